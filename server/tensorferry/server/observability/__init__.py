"""Logs, traces, metrics and the status page."""
