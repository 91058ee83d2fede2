"""The deadline of a call from Ray's proxy to a replica does not depend on synchronised clocks."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest

from tensorferry.server.ray import deadline
from tensorferry.server.ray.deadline import DEADLINE, decode_deadline, encode_deadline


def test_the_deadline_is_exact_on_the_same_machine() -> None:
    """Another process encodes it; the time until it is decoded counts."""
    program = "import time; from tensorferry.server.ray.deadline import encode_deadline; print(time.monotonic(), encode_deadline(5.0))"
    words = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    before, _, value = words.strip().partition(" ")
    deadline = decode_deadline([(DEADLINE, value)])
    assert float(before) + 5 <= deadline < time.monotonic() + 5
    assert decode_deadline([(DEADLINE, value)]) == deadline


def test_the_deadline_of_another_machine_is_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of the other machine do not matter."""
    monkeypatch.setattr(deadline, "CLOCK", "another/time:[1]")
    monkeypatch.setattr(time, "monotonic", lambda: 1e6)
    value = encode_deadline(5.0)
    monkeypatch.undo()
    before = time.monotonic()
    assert before + 5 <= decode_deadline([(DEADLINE, value)]) <= time.monotonic() + 5


@pytest.mark.parametrize("metadata", [[], [("other", "1")], [(DEADLINE, "")], [(DEADLINE, "soon 1 x")]])
def test_a_missing_or_malformed_deadline_is_none(metadata: list[tuple[str, str]]) -> None:
    assert decode_deadline(metadata) == math.inf


def test_the_last_deadline_counts() -> None:
    """The last one is the proxy's; a client's own comes before it."""
    assert (
        decode_deadline([(DEADLINE, encode_deadline(1e6)), (DEADLINE, encode_deadline(1.0))])
        < time.monotonic() + 2
    )
