"""Requests of clients: parsing, templates, limits and contents."""
