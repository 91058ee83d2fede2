"""HTTP/1.1: the third transport of the inference service, and every method of the protocol as a path."""
