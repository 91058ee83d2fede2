"""Log lines: one JSON object each, or text; on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tensorferry.server import logs


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back afterwards."""
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


def test_a_line_is_one_json_object() -> None:
    made = record('3 %s\nin "quotes"', "rows")
    made.created, made.msecs = 1_700_000_000.0, 7.9
    line = logs.JsonFormatter().format(made)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.007Z",
        "level": "warning",
        "logger": "tensorferry.server",
        "message": '3 rows\nin "quotes"',
    }


def test_extra_fields_are_added_whatever_they_are() -> None:
    line = json.loads(logs.JsonFormatter().format(record("m", model="digits", rows=3, error=OSError("gone"))))
    assert (line["model"], line["rows"], line["error"]) == ("digits", 3, "gone")


def test_an_exception_is_in_the_line() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    line = logs.JsonFormatter().format(made)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: why")


def test_json_on_stderr_from_the_level_on(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "warning")
    logging.getLogger("some").info("not this")
    logging.getLogger("some").warning("but %s", "this")
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert json.loads(line)["message"] == "but this"


def test_text_on_stderr(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "info")
    logging.getLogger("some").info("this")
    assert capsys.readouterr().err.endswith("INFO    this\n")


def test_a_message_in_text_is_one_line_whatever_is_in_it(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("text", "info")
    logging.getLogger("some").info("a\r\nb\x1b[2J\u2028 %s é", "c\nd")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("some").exception("failed")
    first, *rest = capsys.readouterr().err.split("\n")
    assert first.endswith(r"INFO    a\r\nb\x1b[2J\u2028 c\nd é")
    assert rest[0].endswith("ERROR   failed")
    assert rest[1:] == ["Traceback (most recent call last):", *rest[2:-2], "ValueError: why", ""]


def test_a_clients_own_words_are_quoted_and_short() -> None:
    assert logs.quoted("a'b\n") == '"a\'b\\n"'
    assert logs.quoted("ü" * 1000) == ascii("ü" * 128 + "...")
    assert logs.about("", ("m", ""), None) == {"model": "m"}


def test_configuring_again_does_not_double_the_lines(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("text", "info")
    logs.configure("json", "info")
    logging.getLogger("some").info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_client_s_header_that_is_no_text_is_no_error(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], level: str
) -> None:
    """grpcio tells of each with a traceback, by the words that are here."""
    logs.configure("json", level)
    try:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    except UnicodeDecodeError:
        logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", b"\xff")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == (["debug"] if level == "debug" else [])
    assert not any("exception" in line for line in lines)
    logging.getLogger("grpc._cython.cygrpc").error("something else")
    assert json.loads(capsys.readouterr().err)["level"] == "error"
