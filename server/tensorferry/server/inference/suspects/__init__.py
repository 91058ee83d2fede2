"""Requests that may end the process."""
