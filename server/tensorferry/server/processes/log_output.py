"""Log lines of the supervisor on stderr. It never waits for their reader, and needs no thread."""

from __future__ import annotations

import logging
import os
import select

from tensorferry.server.telemetry.log_format import JsonFormatter, text_formatter

_log = logging.getLogger("tensorferry.server")

_STDERR = 2
# A pipe that is writable accepts this many bytes without waiting.
_PIECE_BYTES = select.PIPE_BUF


class SupervisorLog(logging.Handler):
    """Handler that writes lines to stderr, and drops those that its reader has no room for. Thread-safe.

    A later line reports the number of dropped ones. The children write to the same stderr.
    """

    def __init__(self, log_format: str) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter() if log_format == "json" else text_formatter(iso_times=False))
        # Guarded by the lock of the handler, as stderr is.
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        if self._lost and self._write(self.format(_lost_lines(self._lost))):
            self._lost = 0
        if not self._write(self.format(record)):
            self._lost += 1

    def put(self, line: str) -> None:
        """Write a line without adding a time or a level. It is lost if stderr has no room for it."""
        self.acquire()
        try:
            self._write(line)
        finally:
            self.release()

    def _write(self, line: str) -> bool:
        data = (line + "\n").encode(errors="backslashreplace")
        poll = select.poll()
        poll.register(_STDERR, select.POLLOUT)
        try:
            while data:
                if not poll.poll(0):
                    return False
                data = data[os.write(_STDERR, data[:_PIECE_BYTES]) :]
        except OSError:
            # Stderr is closed.
            return False
        return True


def configure(log_format: str, level: str) -> SupervisorLog:
    """Send the log lines of this process to stderr."""
    handler = SupervisorLog(log_format)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    return handler


def _lost_lines(count: int) -> logging.LogRecord:
    text = "%d log lines are lost: stderr was not read fast enough"
    return _log.makeRecord(_log.name, logging.WARNING, "", 0, text, (count,), None)
