"""Monitoring over HTTP: metrics, status page and health."""
