"""Logs and trace context, for use by every other package."""
