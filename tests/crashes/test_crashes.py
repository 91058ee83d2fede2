"""A few kills of `make crashes`, and its judgement of what grows."""

from __future__ import annotations

import tempfile
from pathlib import Path

from crashes.crashes import LEAST_KILLS_FOR_TRENDS, Phase, run


def test_processes_that_die_harm_no_other_calls() -> None:
    # A short path, because that of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as folder:
        found = run(2, 1, "lane", Path(folder) / "server")
    assert not found.wrong
    assert not [what for phase in found.phases for what in phase.wrong]
    front_end, engine, abort, _ = found.phases
    assert front_end.connections_lost == engine.connections_lost == abort.connections_lost == 0
    # On a slow machine a neighbour can come more than a second after the abort. It then gets UNAVAILABLE.
    assert {"OK"} <= found.aborts.neighbours.keys() <= {"OK", "UNAVAILABLE"}
    assert found.aborts.aborting.keys() == found.aborts.again.keys() == {"INTERNAL"}
    assert not found.aborts.wrong
    assert {state for _, state in found.states} <= {"OK", "UNAVAILABLE"}
    assert found.sent.total() == found.states.total() > 0


def test_what_grows_is_found() -> None:
    def grown(each: int) -> list[str]:
        phase = Phase("front end", kills=LEAST_KILLS_FOR_TRENDS)
        phase.memory["the engine"] = [100.0 + each * kill for kill in range(phase.kills)]
        phase.files["the engine"] = [20 + each * kill for kill in range(phase.kills)]
        return phase.grown()

    assert not grown(0)
    assert len(grown(2)) == 2
