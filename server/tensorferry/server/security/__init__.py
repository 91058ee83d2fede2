"""Security: access control, credentials, TLS."""
