"""The supervisor's log lines: formats, and a reader that does not read."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator

import pytest

from tensorferry.server.processes import log_output
from tensorferry.server.processes.log_output import SupervisorLog


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The reading end of what is stderr to the supervisor."""
    reading, writing = os.pipe()
    monkeypatch.setattr(log_output, "_STDERR", writing)
    yield reading
    os.close(reading)
    os.close(writing)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("tensorferry.server", logging.ERROR, "", 1, text, (), None)


def test_lines_are_those_of_the_server(pipe: int) -> None:
    SupervisorLog("text").handle(record("one\nline"))
    assert os.read(pipe, 1000).decode().split(" ", 1)[1] == "ERROR   one\\nline\n"
    log = SupervisorLog("json")
    log.handle(record("x" * 20_000))
    line = json.loads(os.read(pipe, 1 << 20))
    assert (line["level"], line["message"]) == ("error", "x" * 20_000)
    log.put("tensorferry serve: as it is")
    assert os.read(pipe, 1000) == b"tensorferry serve: as it is\n"


def test_a_reader_that_does_not_read_never_stops_the_supervisor(pipe: int) -> None:
    log = SupervisorLog("json")
    for _ in range(2000):
        log.handle(record("x" * 1000))
    os.read(pipe, 1 << 20)
    log.handle(record("next"))
    lines = os.read(pipe, 1 << 20).decode().splitlines()
    assert "log lines are lost: stderr was not read fast enough" in lines[0]
    assert json.loads(lines[1])["message"] == "next"


def test_a_closed_stderr_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(log_output, "_STDERR", writing)
    for end in (reading, writing):
        os.close(end)
        SupervisorLog("text").handle(record("lost"))
