"""Checks of configurations against the available memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import small
from support.server.rig import Load, fp32

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.runtime import host_memory
from tensorferry.server.runtime.host_memory import (
    BatchMemory,
    GrowthCheck,
    available_bytes,
)

GIB = 1 << 30


def files(folder: Path, limit: str, used: int, cache: int) -> tuple[Path, Path]:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    meminfo = folder / "meminfo"
    meminfo.write_text(f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable:    {4 * GIB // 1024} kB\n")
    return meminfo, folder


@pytest.mark.parametrize(
    ("limit", "used", "cache", "expected"),
    [
        ("max", GIB, 0, 4 * GIB),
        (str(2 * GIB), GIB, 0, GIB),
        (str(2 * GIB), 2 * GIB, GIB // 2, GIB // 2),
        (str(2 * GIB), 3 * GIB, 0, 0),
        (str(64 * GIB), GIB, 0, 4 * GIB),
    ],
)
def test_the_lesser_of_machine_and_container_is_available(
    tmp_path: Path, limit: str, used: int, cache: int, expected: int
) -> None:
    assert available_bytes(*files(tmp_path, limit, used, cache)) == expected


def test_the_next_step_is_expected_to_take_as_much_as_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = iter([GIB, 3 * GIB, 5 * GIB, 5 * GIB])
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: next(resident))
    growth = GrowthCheck()
    growth.check("a batch of 2 rows", "")
    with pytest.raises(StartError) as caught:
        growth.check("a batch of 4 rows", "lower it")
    assert str(caught.value) == (
        "a batch of 4 rows takes at least 4.00 GiB, and 3.00 GiB of memory are available; lower it"
    )
    growth.check("instance 4", "", steps=2)


def test_a_batch_is_expected_to_take_as_many_times_the_memory_as_it_has_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = 0
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 8 * GIB - taken)
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: taken)
    memory = BatchMemory("x")

    def run(rows: int) -> int:
        """Run rows that take one GiB each."""
        nonlocal taken
        taken = max(taken, rows * GIB)
        return rows

    assert memory.run(2, lambda: run(2)) == 2
    with pytest.raises(MemoryError) as caught:
        memory.run(9, lambda: run(9))
    assert str(caught.value) == (
        "a batch of 9 rows is expected to take 7.00 GiB more than one of 2, and 6.00 GiB of memory are available"
    )
    assert memory.run(8, lambda: run(8)) == 8
    assert memory.rows == 8


def test_a_request_beyond_the_memory_is_run_in_parts(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two rows, memory for 2 more is left; a batch of 8 is expected to take 6 more."""
    model = load(small.twice, max_batch_size=8, batching="trust")
    seen: list[int] = []
    direct = BatchMemory.run

    def limited(self: BatchMemory, rows: int, run: Callable[[], object]) -> object:
        if rows > 2:
            raise MemoryError("too many")
        seen.append(rows)
        return direct(self, rows, run)

    monkeypatch.setattr(BatchMemory, "run", limited)
    answers = model.batcher.submit_rows({"x": fp32(8, 3)}).result(30)["y"]
    assert answers.tolist() == (2 * fp32(8, 3)).tolist()
    assert seen == [2]


def test_a_model_that_runs_requests_whole_is_not_limited(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request of several rows could not be run in parts, and would fail by a prediction."""

    def fails(self: BatchMemory, rows: int, run: Callable[[], object]) -> object:
        raise AssertionError

    model = load(small.softmax_over_rows, "max_batch_size: 8")
    monkeypatch.setattr(BatchMemory, "run", fails)
    assert model.batcher.submit_rows({"x": fp32(8, 3)}).result(30)["share"].shape == (8, 3)


def test_a_max_batch_size_beyond_the_memory_fails_the_load(tmp_path: Path) -> None:
    text = "(float[batch, 1048576] x) => (float[batch, 1048576] y) { y = Relu (x) }"
    path = small.written(tmp_path / "m.onnx", text)
    config = parse_config("max_batch_size: 2147483647 dynamic_batching { }", "test")
    source = ModelSource("m", path, "1", config)
    with pytest.raises(
        StartError, match=r"of a batch of 2147483647 rows takes .* lower max_batch_size, which is 2147483647"
    ):
        load_model(source, LoadContext(ServerConfig(models=(source,), max_queue_size=1 << 31)))
