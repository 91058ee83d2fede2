"""Log lines on stderr, as JSON and as text."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.trace.span import TraceState
from support.server import log_lines
from support.server.rig import PATIENCE

from tensorferry.server.observability.logs import logs
from tensorferry.server.observability.logs.log_format import EXCEPTION, JsonFormatter, text_formatter


@pytest.fixture(autouse=True)
def _patient_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the writer as long as it takes."""
    monkeypatch.setattr(logs, "_LAST_LINES_SECONDS", PATIENCE)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Root logger, restored after the test."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def record(message: str = "%s rows", *args: object, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("tensorferry.server", logging.WARNING, __file__, 1, message, args, None)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


# A field of this name has a traceback as text; its exception quotes a client.
DETAILS = 'Traceback (most recent call last):\n  File "app.py", line 1\nValueError: a\x1b[2Jb\n12:00:00 ERROR forged\r'


def test_a_json_line_is_one_object_with_the_extra_fields_of_any_type() -> None:
    made = record('3 %s\nin "quotes"', "rows", model="digits", error=OSError("gone"), **{EXCEPTION: DETAILS})
    made.created, made.msecs = 1_700_000_000.0, 7.9
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.007Z",
        "level": "warning",
        "logger": "tensorferry.server",
        "message": '3 rows\nin "quotes"',
        "model": "digits",
        "error": "gone",
        "exception": DETAILS,
    }


def test_a_traceback_as_text_follows_the_line_indented() -> None:
    first, *rest = (
        text_formatter(iso_times=False).format(record("failed", **{EXCEPTION: DETAILS})).split("\n")
    )
    assert first.endswith("WARNING failed")
    assert rest == [
        "    Traceback (most recent call last):",
        '      File "app.py", line 1',
        r"    ValueError: a\x1b[2Jb",
        r"    12:00:00 ERROR forged\r",
    ]


def test_a_text_message_stays_on_one_line(root: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "info")
    logging.getLogger("some").info("a\r\nb\x1b[2J\u2028 %s é", "c\nd")
    try:
        raise ValueError("why\x1b[2J\n12:00:00 ERROR   forged")
    except ValueError:
        logging.getLogger("some").exception("failed")
    first, *rest = log_lines.written(capfd).split("\n")
    assert first.endswith(r"INFO    a\r\nb\x1b[2J\u2028 c\nd é")
    assert rest[0].endswith("ERROR   failed")
    assert rest[1:] == [
        "    Traceback (most recent call last):",
        *rest[2:-3],
        r"    ValueError: why\x1b[2J",
        "    12:00:00 ERROR   forged",
        "",
    ]


def test_text_of_clients_is_quoted_and_shortened() -> None:
    assert logs.quote("a'b\n") == '"a\'b\\n"'
    assert logs.quote("ü" * 1000) == ascii("ü" * 128 + "...")
    assert logs.request_fields("", ("m", ""), None) == {"model": "m"}


@pytest.mark.parametrize("level", ["info", "debug"])
def test_faults_in_headers_of_clients_are_debug_lines(
    root: logging.Logger, capfd: pytest.CaptureFixture[str], level: str
) -> None:
    """grpcio logs a traceback of each, and OpenTelemetry quotes each, so that no two lines are equal."""
    logs.configure("json", level)
    try:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    except UnicodeDecodeError:
        logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", b"\xff")
    TraceState.from_header(["no key"])
    lines = [json.loads(line) for line in log_lines.written(capfd).splitlines()]
    assert [line["level"] for line in lines] == (["debug"] * 2 if level == "debug" else [])
    assert not any("exception" in line for line in lines)
    logging.getLogger("grpc._cython.cygrpc").error("something else")
    assert json.loads(log_lines.written(capfd))["level"] == "error"


class Pipe:
    """Pipe in place of stderr. The test decides when it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reading, self.writing = os.pipe()
        monkeypatch.setattr(logs, "_STDERR", self.writing)

    def lines_until(self, last: str) -> list[str]:
        text = b""
        while not (last.encode() in text and text.endswith(b"\n")):
            text += os.read(self.reading, 1 << 16)
        return text.decode().splitlines()

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)


@pytest.fixture
def pipe(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    made = Pipe(monkeypatch)
    yield made
    made.close()


def test_logging_never_waits_for_the_reader_and_lost_lines_are_counted(pipe: Pipe) -> None:
    output = logs.configure("json", "info")
    for number in range(30_000):
        logging.getLogger("some").info("line %d %s", number, "x" * 1000)

    def then() -> None:
        output.flush()
        logging.getLogger("some").info("afterwards")

    following = threading.Thread(target=then)
    following.start()
    messages = [json.loads(line)["message"] for line in pipe.lines_until("afterwards")]
    following.join(PATIENCE)
    logged = [message for message in messages if "log lines are lost" in message]
    assert messages[-1] == "afterwards"
    assert logged[-1].endswith("log lines are lost: stderr was not read fast enough")
    assert len(messages) - len(logged) - 1 + sum(int(message.split()[0]) for message in logged) == 30_000
    assert sum(map(len, messages)) < 3 * logs._MAX_LINES_BYTES


def test_a_non_blocking_pipe_gets_whole_lines(pipe: Pipe) -> None:
    os.set_blocking(pipe.writing, False)
    logs.configure("json", "info")
    logging.getLogger("some").info("x" * 500_000)
    logging.getLogger("some").info("last")
    first, second = pipe.lines_until("last")
    assert len(json.loads(first)["message"]) == 500_000
    assert json.loads(second)["message"] == "last"


@pytest.mark.parametrize("mode", [os.O_RDONLY, os.O_WRONLY])
def test_an_unwritable_stderr_raises_nothing(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """It may be closed, or its disk full."""
    file = os.open("/dev/full", mode)
    monkeypatch.setattr(logs, "_STDERR", file)
    output = logs.configure("text", "info")
    logging.getLogger("some").info("lost")
    assert output._writer.flush(PATIENCE)
    os.close(file)


def test_the_last_lines_are_written_at_the_end_of_the_process() -> None:
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import logging; from tensorferry.server.observability.logs import logs\n"
        "logs.configure('text', 'info')\n"
        "for number in range(500): logging.info('line %d', number)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert [line.split()[-1] for line in ended.stderr.splitlines()] == [str(number) for number in range(500)]
