"""Calls of other models by a model's function, within the server."""
