"""Options of metrics, traces and logs."""

from __future__ import annotations

from dataclasses import dataclass

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import host_name, integer, one_of, port_or_none, switch


@dataclass(frozen=True, kw_only=True)
class ObservabilityOptions:
    """Options of metrics, traces and logs."""

    metrics_port: int | None = option(
        None,
        port_or_none,
        "HTTP port of Prometheus metrics at /metrics, a status page at /, /healthz and /readyz; 0 picks a free port and "
        "prints it; none: no HTTP port",
        scope=OptionScope.STANDALONE,
    )
    metrics_host: str = option(
        "127.0.0.1",
        host_name,
        "address of --metrics-port, which asks for no password; 0.0.0.0 or :: for all addresses",
        scope=OptionScope.STANDALONE,
    )
    otel: bool = option(
        False,
        switch,
        "record OpenTelemetry spans of requests and send them by OTLP, as the environment variables OTEL_* say; needs "
        "tensorferry[otel]",
        scope=OptionScope.STANDALONE,
    )
    access_log: int = option(
        0,
        integer(0, unit="lines per second"),
        "most log lines about successful requests, and as many about failed ones; 0: no such lines",
        scope=OptionScope.STANDALONE,
    )
    log_format: str = option("text", one_of("text", "json"), "format of the log lines on stderr")
    log_level: str = option(
        "info", one_of("debug", "info", "warning", "error"), "lowest level of messages that are logged"
    )
