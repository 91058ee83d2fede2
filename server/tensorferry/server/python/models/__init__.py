"""Models that are Python functions."""
