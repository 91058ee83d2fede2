"""Log lines of the supervisor on stderr. It never waits for their reader, and needs no thread."""

from __future__ import annotations

import logging
import os
import select

from tensorferry.server.observability.logs.log_format import JsonFormatter, lost_lines, text_formatter

_STDERR = 2


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
        if self._lost and _write(self.format(lost_lines(self._lost))):
            self._lost = 0
        if not _write(self.format(record)):
            self._lost += 1

    def put(self, line: str) -> None:
        """Write a line without adding a time or a level. It is lost if stderr has no room for it."""
        self.acquire()
        try:
            _write(line)
        finally:
            self.release()


def configure(log_format: str, level: str) -> SupervisorLog:
    """Send the log lines of this process to stderr."""
    handler = SupervisorLog(log_format)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    return handler


def _write(line: str) -> bool:
    data = (line + "\n").encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(_STDERR, select.POLLOUT)
    try:
        while data and poll.poll(0):
            # A pipe that is writable accepts this many bytes without waiting.
            data = data[os.write(_STDERR, data[: select.PIPE_BUF]) :]
    except OSError:
        # Stderr is closed.
        return False
    return not data
