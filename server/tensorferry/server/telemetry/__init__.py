"""Logs and trace context, usable by every other package."""
