"""A call's deadline on its way from Ray's proxy to a replica: by no clock that two machines would have to agree on."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest

from tensorferry.server.ray import deadline
from tensorferry.server.ray.deadline import DEADLINE, deadline_of, told


def test_on_the_same_machine_it_is_exact_and_transfer_counts() -> None:
    """Another process, as a proxy is, tells it; however long that took to get here."""
    program = (
        "import time; from tensorferry.server.ray.deadline import told; print(time.monotonic(), told(5.0))"
    )
    words = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    before, _, value = words.strip().partition(" ")
    deadline = deadline_of([(DEADLINE, value)])
    assert float(before) + 5 <= deadline < time.monotonic() + 5
    assert deadline_of([(DEADLINE, value)]) == deadline


def test_from_another_machine_it_is_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose clocks are days ahead, or behind: neither the time of the day nor its own counts here."""
    monkeypatch.setattr(deadline, "CLOCK", "another/time:[1]")
    monkeypatch.setattr(time, "monotonic", lambda: 1e6)
    value = told(5.0)
    monkeypatch.undo()
    before = time.monotonic()
    assert before + 5 <= deadline_of([(DEADLINE, value)]) <= time.monotonic() + 5


def test_where_nothing_tells_machines_apart_it_is_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "CLOCK", "none")
    value = told(5.0)
    before = time.monotonic()
    assert before + 5 <= deadline_of([(DEADLINE, value)]) <= time.monotonic() + 5


@pytest.mark.parametrize("metadata", [[], [("other", "1")], [(DEADLINE, "")], [(DEADLINE, "soon 1 x")]])
def test_without_one_there_is_none(metadata: list[tuple[str, str]]) -> None:
    assert deadline_of(metadata) == math.inf


def test_the_last_counts() -> None:
    """Which is the proxy's; a client's own comes before."""
    assert deadline_of([(DEADLINE, told(1e6)), (DEADLINE, told(1.0))]) < time.monotonic() + 2
