"""The cores of the machine or container, and their division."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorferry.server.system.cores import session_threads, usable_cores


@pytest.mark.parametrize(
    ("cpu_max", "found"), [("max 100000\n", 8), ("150000 100000\n", 2), ("10000 100000\n", 1), (None, 8)]
)
def test_the_cores_are_those_of_the_affinity_and_of_the_quota(
    cpu_max: str | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    file = tmp_path / "cpu.max"
    if cpu_max is not None:
        file.write_text(cpu_max)
    assert usable_cores(file) == found


def test_processes_divide_the_cores_between_their_sessions() -> None:
    assert [session_threads(16, 3), session_threads(8, 8), session_threads(2, 8)] == [5, 1, 1]
