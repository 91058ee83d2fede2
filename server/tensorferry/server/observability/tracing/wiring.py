"""Start and stop of the access log and of OpenTelemetry, by the server's options."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tensorferry.batcher import ResponseBurstHook
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.observability.tracing.access_log import AccessLog
from tensorferry.server.observability.tracing.trace import Tracer
from tensorferry.server.system.install_command import install_command

if TYPE_CHECKING:
    from tensorferry.server.observability.tracing.otel_export import SpanExport

_log = logging.getLogger("tensorferry.server")


class RequestTelemetry:
    """Trace sources that the options enable. `tracing` creates the traces of requests.

    `response_hook` is the hook for batchers: the given one, wrapped by OpenTelemetry if spans are enabled.
    """

    def __init__(self, config: ServerConfig, response_hook: ResponseBurstHook) -> None:
        self.tracing = Tracer()
        self.response_hook = response_hook
        self._otel = config.otel
        self._access_log = AccessLog(config.access_log) if config.access_log else None
        self._export: SpanExport | None = None

    def start(self) -> None:
        """Start the sources, before any model is loaded. StartError for invalid options."""
        if self._otel:
            self._export = _open_export(self.response_hook)
            if (source := self._export.source) is not None:
                self.response_hook = source
                self.tracing.add(source)
        if self._access_log is not None:
            self._access_log.start()
            self.tracing.add(self._access_log)

    def stop(self, timeout: float) -> None:
        """Flush each source, for at most `timeout` seconds each. Idempotent."""
        if self._access_log is not None and not self._access_log.stop(timeout):
            _log.warning("access log: the last lines are lost, because its output is not read")
        export, self._export = self._export, None
        if export is not None and not export.stop(timeout):
            _log.warning(
                "OpenTelemetry: the last spans are lost, because the collector took longer than %g s", timeout
            )


def _open_export(response_hook: ResponseBurstHook) -> SpanExport:
    try:
        # Imported only if enabled: it is an optional extra and slow to import.
        from tensorferry.server.observability.tracing.otel_export import SpanExport
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise StartError(
            f"--otel is given, but {error.name} is not installed: {install_command('otel')}"
        ) from None
    return SpanExport(response_hook)
