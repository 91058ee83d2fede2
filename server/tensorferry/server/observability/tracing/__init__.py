"""Request traces: OpenTelemetry spans and the access log."""
