"""Log lines, as text for a person or as one JSON object each for a machine.

No thread that logs waits for the reader of stderr: lines go through a bounded queue to a thread that writes them.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.server.telemetry.log_writer import BackgroundWriter
from tensorferry.server.telemetry.repeated_warnings import RepeatLimit
from tensorferry.server.telemetry.trace_context import TraceContext

_log = logging.getLogger("tensorferry.server")

# Here grpcio tells, with a traceback, of every header that is no text: by which any client could fill the log.
_GRPC = "grpc._cython.cygrpc"
_NO_TEXT = "Invalid encoding on %s"

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and what `extra` adds."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


# As much of what a client calls its request as a line quotes.
_MOST_QUOTED = 128


def quote(text: str) -> str:
    """A client's own words, for a line: short, in quotes, and without anything that ends a line or moves a cursor."""
    return ascii(text if len(text) <= _MOST_QUOTED else text[:_MOST_QUOTED] + "...")


def request_fields(request_id: str, model: tuple[str, str], context: TraceContext | None) -> dict[str, str]:
    """What a line about a request has beside its message, in JSON: which it is, and the span it belongs to."""
    fields = {
        "request_id": request_id[:_MOST_QUOTED],
        "model": model[0][:_MOST_QUOTED],
        "model_version": model[1][:_MOST_QUOTED],
    }
    if context is not None:
        fields["trace_id"], fields["span_id"] = context.trace_id, context.span_id
    return {name: value for name, value in fields.items() if value}


@dataclass(frozen=True, slots=True)
class LogLevels:
    """Which lines are written. Each severity is switched by itself, and `verbose_level` above 0 shows debug lines.

    `iso_times` is about text: times are ISO 8601 in UTC rather than the local time of day. JSON has always the former.
    """

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    iso_times: bool = False

    def shows(self, level: int) -> bool:
        """Whether a record of this level is written."""
        if level >= logging.ERROR:
            return self.error
        if level >= logging.WARNING:
            return self.warning
        return self.info if level >= logging.INFO else self.verbose_level > 0

    @property
    def least_level(self) -> int:
        """The least level of which anything is written."""
        levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
        return next((level for level in levels if self.shows(level)), logging.CRITICAL + 1)


# Lines that wait for the reader of stderr; more are dropped and counted.
_MOST_WAITING = 10_000
_MOST_WAITING_BYTES = 4 << 20
# How long the end of the process waits for that reader.
_LAST_LINES_SECONDS = 1.0
_STDERR = 2


class LogOutput:
    """The program's log lines on stderr, and which of them are written. Thread-safe.

    Lines are dropped, and counted in a later line, while more than 10,000 or 4 MiB of them wait to be written.
    """

    def __init__(self, log_format: str, level: str) -> None:
        self.json = log_format == "json"
        least = getattr(logging, level.upper())
        # Guards changes of _shown, with the handler and the level that follow it. Nothing is logged meanwhile.
        self._lock = threading.Lock()
        self._shown = LogLevels(
            info=least <= logging.INFO,
            warning=least <= logging.WARNING,
            verbose_level=1 if least <= logging.DEBUG else 0,
            iso_times=self.json,
        )
        self._repeats = RepeatLimit()
        # Counts lines that were dropped. Guarded by _lost_lock, under which nothing is called.
        self._lost_lock = threading.Lock()
        self._lost = 0
        self._writer: BackgroundWriter[bytes] = BackgroundWriter(
            "log-writer",
            self._write,
            lambda fault: _log.error("the thread that writes the log failed; it goes on", exc_info=fault),
            most=_MOST_WAITING,
            most_bytes=_MOST_WAITING_BYTES,
        )
        self._writer.start()
        self._handler = _QueueHandler(self)
        self._handler.addFilter(lambda record: self._shown.shows(record.levelno))
        self._handler.addFilter(self._repeats)
        logging.basicConfig(handlers=[self._handler], force=True)
        logging.getLogger(_GRPC).addFilter(_of_the_server)
        self._follow_locked()

    @property
    def shown(self) -> LogLevels:
        """What is written now."""
        return self._shown

    def replace(self, shown: LogLevels, by: LogLevels) -> bool:
        """Changes what is written; false, and nothing is changed, when it is not `shown` any more."""
        with self._lock:
            if self._shown != shown:
                return False
            self._shown = by
            self._follow_locked()
        return True

    def put(self, line: str) -> None:
        """Writes a line as it is, soon. Never waits."""
        data = (line + "\n").encode(errors="backslashreplace")
        if not self._writer.put(data, len(data)):
            with self._lost_lock:
                self._lost += 1

    def flush(self, timeout: float = _LAST_LINES_SECONDS) -> bool:
        """Whether every line so far is written, after waiting for it for at most `timeout` seconds."""
        if left_out := self._repeats.take_left_out():
            _log.warning("%d warnings or errors that repeat others were left out of the log", left_out)
        return self._writer.flush(timeout)

    def close(self) -> None:
        """End the thread once what is waiting is written. Lines that follow are lost."""
        self._writer.stop(0)

    def _write(self, lines: Sequence[bytes]) -> None:
        """On the writer's thread."""
        _write_all(b"".join(lines))
        with self._lost_lock:
            lost, self._lost = self._lost, 0
        if lost:
            record = _log.makeRecord(_log.name, logging.WARNING, "", 0, _LOST, (lost,), None)
            _write_all(f"{self._handler.format(record)}\n".encode())

    def _follow_locked(self) -> None:
        shown = self._shown
        self._handler.setFormatter(JsonFormatter() if self.json else _text_formatter(shown.iso_times))
        # Lines that nobody sees are then not made.
        logging.getLogger().setLevel(shown.least_level)


_LOST = "%d log lines are lost: stderr was not read fast enough"


class _QueueHandler(logging.Handler):
    """Handler that formats a record where it is logged, since its arguments may change later."""

    def __init__(self, output: LogOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line."""
        try:
            self._output.put(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait a moment for all lines to be written, as `logging.shutdown` asks at the end of the process."""
        self._output.flush()

    def close(self) -> None:
        """Write no more than what is waiting."""
        self._output.close()
        super().close()


def _write_all(data: bytes) -> None:
    """Write to stderr; lines are lost where that is closed, full, or was never open."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(_STDERR, rest) :]
        except BlockingIOError:
            # A pipe that another process has set to be non-blocking.
            select.select([], [_STDERR], [])
        except OSError:
            return


class _TextFormatter(logging.Formatter):
    """One line for each message, whatever a client's words in it hold; a traceback has lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name is logging's)
        """The line, its control characters as escapes."""
        line = super().formatMessage(record)
        if left_out := getattr(record, "repeats_left_out", 0):
            line += f" ({left_out} more like this were left out)"
        return line if line.isprintable() else "".join(map(_visible, line))


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def _of_the_server(record: logging.LogRecord) -> bool:
    """Lets everything through, but a client's fault as what it is: nothing that anybody should be told of."""
    if record.msg == _NO_TEXT:
        record.levelno, record.levelname, record.exc_info = logging.DEBUG, "DEBUG", None
        return logging.getLogger().isEnabledFor(logging.DEBUG)
    return True


def _text_formatter(iso_times: bool) -> logging.Formatter:
    formatter = _TextFormatter(
        "%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%SZ" if iso_times else "%H:%M:%S"
    )
    if iso_times:
        formatter.converter = time.gmtime
    return formatter


def configure(log_format: str, level: str) -> LogOutput:
    """Sends the program's log lines to stderr. For the command line only, never for a library."""
    return LogOutput(log_format, level)
