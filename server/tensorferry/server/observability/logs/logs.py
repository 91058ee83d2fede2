"""Log lines on stderr, as text or as one JSON object each.

Lines go through a bounded queue to a writer thread, so logging never waits for the reader of stderr.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tensorferry.server.errors import truncate
from tensorferry.server.observability.logs.log_format import JsonFormatter, lost_lines, text_formatter
from tensorferry.server.observability.logs.log_writer import BackgroundWriter
from tensorferry.server.observability.logs.repeated_warnings import RepeatLimit
from tensorferry.server.observability.logs.trace_context import TraceContext

_log = logging.getLogger("tensorferry.server")

# Logger and message by which grpcio reports, with a traceback, each header that is not text. Any client could fill the
# log with them.
_GRPC = "grpc._cython.cygrpc"
_NOT_TEXT = "Invalid encoding on %s"
# Logger by which OpenTelemetry reports each malformed header `tracestate`, and quotes it.
_TRACE_STATE = "opentelemetry.trace.span"

# Limit for text of clients in a line.
_MAX_QUOTED = 128


def quote(text: str) -> str:
    """Quote and shorten text of a client for a log line, with control characters escaped."""
    return ascii(truncate(text))


def request_fields(request_id: str, model: tuple[str, str], context: TraceContext | None) -> dict[str, str]:
    """Return the JSON fields of a line about a request: its id, model and span."""
    fields = {
        "request_id": request_id[:_MAX_QUOTED],
        "model": model[0][:_MAX_QUOTED],
        "model_version": model[1][:_MAX_QUOTED],
    }
    if context is not None:
        fields["trace_id"], fields["span_id"] = context.trace_id, context.span_id
    return {name: value for name, value in fields.items() if value}


@dataclass(frozen=True, slots=True)
class LogLevels:
    """Severities that are written; a `verbose_level` above 0 includes debug lines.

    With `iso_times`, text lines have ISO 8601 times in UTC instead of the local time of day. JSON lines always do.
    """

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    iso_times: bool = False

    def includes(self, level: int) -> bool:
        """Return whether records of this level are written."""
        if level >= logging.ERROR:
            return self.error
        if level >= logging.WARNING:
            return self.warning
        return self.info if level >= logging.INFO else self.verbose_level > 0

    @property
    def least_level(self) -> int:
        """Lowest level that is written."""
        levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
        return next((level for level in levels if self.includes(level)), logging.CRITICAL + 1)


# Limits for queued lines. Further lines are dropped and counted.
_MAX_LINES = 10_000
_MAX_LINES_BYTES = 4 << 20
# Wait for the reader of stderr at the end of the process.
_LAST_LINES_SECONDS = 1.0
_STDERR = 2


class LogOutput(logging.Handler):
    """The program's log output on stderr. Thread-safe.

    Lines beyond 10,000 or 4 MiB of queued lines are dropped. A later line reports their number.
    """

    def __init__(self, log_format: str, level: str) -> None:
        super().__init__()
        self.json = log_format == "json"
        least = getattr(logging, level.upper())
        # Guards writes of _levels, and the settings of this handler and the root logger. Nothing is logged meanwhile.
        self._levels_lock = threading.Lock()
        self._levels = LogLevels(
            info=least <= logging.INFO,
            warning=least <= logging.WARNING,
            verbose_level=1 if least <= logging.DEBUG else 0,
            iso_times=self.json,
        )
        self._repeat_limit = RepeatLimit()
        # Guards _lost, the number of dropped lines. Nothing is called while it is held.
        self._lost_lock = threading.Lock()
        self._lost = 0
        self._writer: BackgroundWriter[bytes] = BackgroundWriter(
            "log-writer",
            self._write,
            max_items=_MAX_LINES,
            max_bytes=_MAX_LINES_BYTES,
        )
        self._writer.start()
        self.addFilter(lambda record: self._levels.includes(record.levelno))
        self.addFilter(self._repeat_limit)
        logging.basicConfig(handlers=[self], force=True)
        for name in (_GRPC, _TRACE_STATE):
            logging.getLogger(name).addFilter(_downgrade_client_faults)
        self._apply_locked()

    @property
    def levels(self) -> LogLevels:
        """Levels that are written now."""
        return self._levels

    def replace(self, expected: LogLevels, new: LogLevels) -> bool:
        """Change the levels to `new`. Return False without a change if they are not `expected` any more."""
        with self._levels_lock:
            if self._levels != expected:
                return False
            self._levels = new
            self._apply_locked()
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record, which is formatted now, since its arguments may change later. Never waits."""
        try:
            self.put(self.format(record))
        except Exception:
            self.handleError(record)

    def put(self, line: str) -> None:
        """Queue a formatted line. Never waits."""
        data = (line + "\n").encode(errors="backslashreplace")
        if not self._writer.put(data, len(data)):
            with self._lost_lock:
                self._lost += 1

    def flush(self) -> None:
        """Wait at most a second for all lines to be written. `logging.shutdown` calls this at the end of the process."""
        if left_out := self._repeat_limit.take_left_out():
            _log.warning("%d warnings or errors that repeat others were left out of the log", left_out)
        self._writer.flush(_LAST_LINES_SECONDS)

    def close(self) -> None:
        """Stop the writer after the queued lines. Later lines are lost."""
        self._writer.stop(0)
        super().close()

    def _write(self, lines: Sequence[bytes]) -> None:
        """Write lines, and the number of dropped ones. Runs on the writer's thread."""
        _write_all(b"".join(lines))
        with self._lost_lock:
            lost, self._lost = self._lost, 0
        if lost:
            _write_all(f"{self.format(lost_lines(lost))}\n".encode())

    def _apply_locked(self) -> None:
        levels = self._levels
        self.setFormatter(JsonFormatter() if self.json else text_formatter(levels.iso_times))
        # Loggers then skip lines that would not be written.
        logging.getLogger().setLevel(levels.least_level)


def _write_all(data: bytes) -> None:
    """Write to stderr. Lines are lost if it is closed or full."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(_STDERR, rest) :]
        except BlockingIOError:
            # Another process has made the pipe non-blocking.
            select.select([], [_STDERR], [])
        except OSError:
            return


def _downgrade_client_faults(record: logging.LogRecord) -> bool:
    """Make records about clients' headers debug records. Others pass unchanged."""
    if record.msg == _NOT_TEXT or record.name == _TRACE_STATE:
        record.levelno, record.levelname, record.exc_info = logging.DEBUG, "DEBUG", None
        return logging.getLogger().isEnabledFor(logging.DEBUG)
    return True


def configure(log_format: str, level: str) -> LogOutput:
    """Send the program's log lines to stderr. Only for the command line, not for use as a library."""
    return LogOutput(log_format, level)
