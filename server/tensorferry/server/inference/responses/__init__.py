"""Responses to clients: bytes, sizes and classes."""
