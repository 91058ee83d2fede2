"""What operators see of a server: metrics, status page, health over HTTP."""
