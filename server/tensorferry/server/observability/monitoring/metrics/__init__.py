"""The metrics page."""
