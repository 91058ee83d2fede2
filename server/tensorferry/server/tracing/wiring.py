"""What is told of single requests as the options say: built, started and stopped in one place."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version
from typing import TYPE_CHECKING

from tensorferry.batcher import ResponseBurstHook
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.tracing.access_log import AccessLog
from tensorferry.server.tracing.trace import Tracer

if TYPE_CHECKING:
    from tensorferry.server.tracing.otel_export import SpanExport

_log = logging.getLogger("tensorferry.server")


class RequestTelemetry:
    """`tracing` is what requests are traced by, `together` what batchers are to tell of the answers of a batch.

    The latter is the one given, and OpenTelemetry in front of it where there are to be spans.
    """

    def __init__(self, config: ServerConfig, together: ResponseBurstHook) -> None:
        self.tracing = Tracer()
        self.together = together
        self._otel = config.otel
        self._access_log = AccessLog(config.access_log) if config.access_log else None
        self._export: SpanExport | None = None

    def start(self) -> None:
        """Before any model is loaded. StartError for what cannot be."""
        if self._otel:
            self._export = _exported(self.together)
            if (source := self._export.source) is not None:
                self.together = source
                self.tracing.switch(source, on=True)
        if self._access_log is not None:
            self._access_log.start()
            self.tracing.switch(self._access_log, on=True)

    def stop(self, timeout: float) -> None:
        """Has the last of it written or sent, for which it waits at most so long for each. Idempotent."""
        if self._access_log is not None and not self._access_log.stop(timeout):
            _log.warning("the last lines of the access log are not written: nobody reads them")
        export, self._export = self._export, None
        if export is not None and not export.stop(timeout):
            _log.warning("the last spans are not sent: the collector took longer than %g s", timeout)


def _exported(together: ResponseBurstHook) -> SpanExport:
    try:
        # Here, since only those who ask for it have it, and it takes a while to import.
        from tensorferry.server.tracing.otel_export import SpanExport
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise StartError(
            f"--otel is given, but {error.name} is not installed: pip install 'tensorferry[otel]'"
        ) from None
    return SpanExport(os.environ, version("tensorferry"), together)
