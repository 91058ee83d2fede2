"""A few kills of `make crashes`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from crashes.crashes import run


@pytest.mark.timeout(300)
def test_processes_that_die_harm_no_other_calls() -> None:
    # A short path, because that of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as folder:
        found = run(1, 1, "lane", Path(folder) / "server")
    assert not found.wrong
    assert not [what for phase in found.phases for what in phase.wrong]
    assert found.phases[0].connections_lost == 0
    assert found.poison.right
    assert {state for _, state in found.states} <= {"OK", "UNAVAILABLE"}
    assert found.sent.total() == found.states.total() > 0
