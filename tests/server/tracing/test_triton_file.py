"""Trace files: complete JSON at any time, numbered files, and no waiting."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.server.rig import PATIENCE

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.batcher.testing import VirtualClock
from tensorferry.server.errors import StartError
from tensorferry.server.tracing import triton_file
from tensorferry.server.tracing.triton_file import TraceFile, TraceFileSeries


@pytest.fixture
def file(tmp_path: Path) -> Iterator[TraceFile]:
    made = TraceFile(tmp_path / "traces.json")
    yield made
    assert made.stop(PATIENCE)


def ids(path: Path) -> list[int]:
    return [trace["id"] for trace in json.loads(path.read_text())]


def written(file: TraceFile, *items: tuple[TraceFileSeries, int]) -> None:
    """Write traces at once, without the writer's thread."""
    file._write([(sheet, [{"id": number}]) for sheet, number in items])


def test_one_file_is_complete_json_after_each_trace(file: TraceFile) -> None:
    sheet, other = TraceFileSeries(None), TraceFileSeries(None)
    file.path.write_text("from another time")
    written(file, (sheet, 1))
    assert ids(file.path) == [1]
    written(file, (sheet, 2), (other, 3))
    assert ids(file.path) == [1, 2, 3]


def test_numbered_files_hold_the_configured_number_of_traces(file: TraceFile) -> None:
    pairs, rest = TraceFileSeries(2), TraceFileSeries(0)
    written(file, (pairs, 1), (pairs, 2), (pairs, 3))
    written(file, (rest, 4), (pairs, 5), (pairs, 6), (rest, 7))
    assert {path.name: ids(path) for path in file.path.parent.iterdir()} == {
        "traces.json.0": [1, 2],
        "traces.json.1": [3, 5],
        "traces.json.2": [4, 7],
        "traces.json.3": [6],
    }


def test_a_trace_and_those_of_its_stages_are_in_the_same_file(file: TraceFile) -> None:
    pairs = TraceFileSeries(2)
    for number in range(3):
        file._write([(pairs, [{"id": 10 * number}, {"id": 10 * number + 1}])])
    assert ids(file.path.with_name("traces.json.0")) == [0, 1, 10, 11]
    assert ids(file.path.with_name("traces.json.1")) == [20, 21]


def test_a_removed_file_is_started_again(file: TraceFile) -> None:
    sheet = TraceFileSeries(None)
    written(file, (sheet, 1))
    file.path.rename(file.path.with_name("away.json"))
    written(file, (sheet, 2))
    assert ids(file.path) == [2]
    assert ids(file.path.with_name("away.json")) == [1]


def test_all_traces_are_written_before_stop_returns(file: TraceFile) -> None:
    file.start()
    sheet = TraceFileSeries(None)
    for number in range(500):
        file.write(sheet, {"id": number})
    assert file.stop(PATIENCE)
    assert ids(file.path) == list(range(500))


def test_the_queue_is_limited_and_lost_traces_are_logged(
    file: TraceFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_file, "_MAX_QUEUED", 3)
    bounded = TraceFile(file.path)
    sheet = TraceFileSeries(None)
    for number in range(5):
        bounded.write(sheet, {"id": number})
    bounded.start()
    assert bounded.stop(PATIENCE)
    assert ids(file.path) == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "2 traces are lost: the queue of 3 traces was full"
    ]


def test_a_failing_disk_is_logged_once_and_retried(file: TraceFile, caplog: pytest.LogCaptureFixture) -> None:
    sheet = TraceFileSeries(None)
    file.path.mkdir()
    for number in range(3):
        written(file, (sheet, number))
    file.path.rmdir()
    written(file, (sheet, 3))
    assert ids(file.path) == [3]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("traces cannot be written and are lost: ")


@pytest.mark.parametrize("already", [0, 2])
def test_traces_are_written_again_once_the_disk_has_room(file: TraceFile, already: int) -> None:
    sheet = TraceFileSeries(None)
    for number in range(already):
        written(file, (sheet, number))
    full = (file.path.stat().st_size if already else 0) + 8
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, before[1]))
    try:
        for number in range(10, 13):
            written(file, (sheet, number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if already:
        assert ids(file.path) == list(range(already)), "the array is whole while the disk is full"
    written(file, (sheet, 20))
    written(file, (sheet, 21))
    assert ids(file.path) == [*range(already), 20, 21]


def test_a_truncated_file_is_started_again(file: TraceFile) -> None:
    sheet = TraceFileSeries(None)
    written(file, (sheet, 1))
    file.path.write_bytes(b"")
    written(file, (sheet, 2))
    assert ids(file.path) == [2]


def test_repeated_faults_cause_pauses(
    file: TraceFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(json, "dumps", fails := Mock(side_effect=MemoryError))
    clock = VirtualClock()
    file = TraceFile(file.path, RestartBackoff(clock))
    file.start()
    for count, seconds in enumerate((0.01, 0.02), 1):
        file.write(TraceFileSeries(None), {})
        clock.await_sleepers(until=clock.now() + seconds)
        file.write(TraceFileSeries(None), {})
        assert fails.call_count == count
        assert caplog.text.count("the thread trace-writer crashed (bug)") == count
        clock.advance(seconds)
    clock.await_sleepers(until=clock.now() + 0.04)
    assert file.stop(PATIENCE), "stop does not wait for the pause"


@pytest.mark.parametrize("name", ["", "folder", "missing/traces.json", "file/traces.json"])
def test_an_impossible_path_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StartError, match=r"--trace-file is .*; it must name a file in an existing, writable directory"
    ):
        TraceFile(tmp_path / name).start()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StartError, match="can be written to"):
        TraceFile(tmp_path / "traces.json").start()


def test_stop_works_without_start(file: TraceFile) -> None:
    assert file.stop(PATIENCE)
    never: Any = TraceFile(file.path)
    assert never.stop(0)
