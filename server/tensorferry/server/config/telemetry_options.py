"""The options that say what is told of single requests: spans of them, and lines in the log."""

from __future__ import annotations

from tensorferry.server.config.option_types import Option, integer, switch

TELEMETRY_OPTIONS: tuple[Option, ...] = (
    switch(
        "otel",
        "otel",
        "make OpenTelemetry spans of requests and send them by OTLP, as the variables OTEL_* say; needs tensorferry[otel]",
    ),
    Option(
        "access-log",
        "access_log",
        integer(0),
        "an integer of at least 0",
        "lines a second at most that the log has about answered requests, and as many about others; 0: none",
    ),
)
