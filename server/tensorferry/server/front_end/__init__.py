"""A front-end: HTTP/2, TLS, identity and limits, for requests that the engine answers."""
