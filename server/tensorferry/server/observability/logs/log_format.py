"""Formats of log lines: text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from tensorferry.server.names import printable

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# Field of a record with a traceback as text, from another process or without references to the frames. In JSON it is
# the field that the traceback of `exc_info` has too.
EXCEPTION = "exception"


class JsonFormatter(logging.Formatter):
    """Formatter with one JSON object per line: time (UTC), level, logger, message and the `extra` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            line[EXCEPTION] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    """Formatter that keeps each message on one line, whatever it quotes. A traceback has further lines.

    These are indented, because its exception can quote text of a client or a name of a model's file.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of the record."""
        text = super().format(record)
        details: str = getattr(record, EXCEPTION, "")
        return "\n".join([text, *_indented(details)]) if details else text

    def formatException(self, ei: Any) -> str:  # noqa: N802 (the name is logging's)
        """Return the lines of a traceback."""
        return "\n".join(_indented(super().formatException(ei)))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name is logging's)
        """Return the line with control characters escaped."""
        line = super().formatMessage(record)
        if left_out := getattr(record, "repeats_left_out", 0):
            line += f" ({left_out} more like this were left out)"
        return printable(line)


def _indented(details: str) -> list[str]:
    return [f"    {printable(line)}" for line in details.split("\n")]


def lost_lines(count: int) -> logging.LogRecord:
    """Return the record that reports the number of dropped lines."""
    message = "%d log lines are lost: stderr was not read fast enough"
    return logging.LogRecord("tensorferry.server", logging.WARNING, "", 0, message, (count,), None)


def text_formatter(iso_times: bool) -> logging.Formatter:
    """Return the formatter of text lines, with the local time of day, or ISO 8601 times in UTC."""
    formatter = _TextFormatter(
        "%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%SZ" if iso_times else "%H:%M:%S"
    )
    if iso_times:
        formatter.converter = time.gmtime
    return formatter
