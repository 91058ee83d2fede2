"""Channels: target, TLS, token, retries, deadlines."""
