"""Request traces: Triton's trace files, OpenTelemetry spans, the access log."""
