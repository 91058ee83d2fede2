"""The engine for trials: who gets it, and when it starts and ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.open_files import open_files
from support.server.supervision import ABORTED, CLEAN, KILLED, Supervision

TRIALS = "the engine for trials"
REFUSAL = {"digest": "d" * 32, "until": 700.5}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Supervision]:
    """A server that runs, with what its start has sent forgotten."""
    before = open_files()
    made = Supervision(tmp_path).run()
    made.forget()
    yield made
    assert not open_files() - before, "descriptors of links are left"


def suspects(server: Supervision, index: int, count: int) -> None:
    server.say(f"front-end {index}", "suspects", count=count)


def loaded(server: Supervision) -> None:
    server.say(TRIALS, "ready")
    server.say(TRIALS, "health", serving={"m": True}, ready=True, loaded=True)


def test_it_starts_when_a_front_end_has_suspects_and_ends_after_the_last(server: Supervision) -> None:
    suspects(server, 0, 3)
    assert server.launched[-1] == TRIALS
    (kind, start), (linked, fields) = server.child(TRIALS).take()
    assert (kind, linked) == ("start", "link")
    assert start["trial"]
    assert start["socket"] != server.supervisor._socket(server.supervisor._engine)
    assert fields["front_end"] == 0
    assert server.front_end(0).kinds() == ["trial"]
    loaded(server)
    assert server.front_end(0).kinds() == ["trial_ready"]
    suspects(server, 0, 0)
    assert server.front_end(0).take() == [("trial_over", {"died": False})]
    assert server.child(TRIALS).kinds() == ["stop"]
    server.end(TRIALS, CLEAN)
    assert TRIALS not in server.alive()
    assert server.front_end(0).kinds() == server.front_end(1).kinds() == []


def test_it_is_killed_if_it_does_not_end(server: Supervision) -> None:
    suspects(server, 0, 1)
    loaded(server)
    suspects(server, 0, 0)
    server.wait(4.9)
    assert not server.child(TRIALS).killed
    server.wait(0.2)
    assert server.child(TRIALS).killed
    server.end(TRIALS, KILLED)


def test_front_ends_have_it_one_after_the_other(server: Supervision) -> None:
    suspects(server, 1, 1)
    suspects(server, 0, 1)
    loaded(server)
    assert server.front_end(1).kinds() == ["trial", "trial_ready"]
    assert server.front_end(0).kinds() == []
    suspects(server, 1, 0)
    assert server.front_end(1).kinds() == ["trial_over"]
    assert server.front_end(0).kinds() == ["trial", "trial_ready"]
    suspects(server, 0, 0)
    server.end(TRIALS, CLEAN)
    assert server.launched.count(TRIALS) == 1


def test_it_starts_again_for_suspects_that_are_left_after_it_died(server: Supervision) -> None:
    suspects(server, 0, 3)
    loaded(server)
    server.forget()
    server.end(TRIALS, ABORTED)
    assert server.front_end(0).take() == [("trial_over", {"died": True})]
    assert TRIALS not in server.alive()
    suspects(server, 0, 2)
    assert server.child(TRIALS).kinds() == ["start", "link"]
    assert server.launched.count(TRIALS) == 2


def test_the_real_engine_comes_first(server: Supervision) -> None:
    server.end("the engine", ABORTED)
    suspects(server, 0, 1)
    assert TRIALS not in server.alive()
    server.engine_ready()
    assert TRIALS in server.alive()


def test_its_end_is_no_end_of_the_server(server: Supervision) -> None:
    suspects(server, 0, 1)
    server.end(TRIALS, ABORTED)
    assert server.exit_status is None
    assert server.alive() == ["the engine", "front-end 0", "front-end 1"]
    server.wait(100)
    assert len(server.launched) == 4


def test_each_front_end_is_told_once_if_it_cannot_be_started(server: Supervision) -> None:
    server.unlaunchable.add(TRIALS)
    server.say("front-end 0", "suspects", count=2)
    assert server.front_end(0).take() == [("trial_over", {"died": True})]
    assert server.front_end(1).kinds() == []


def test_a_front_end_that_dies_loses_its_turn(server: Supervision) -> None:
    suspects(server, 0, 1)
    suspects(server, 1, 1)
    loaded(server)
    server.forget()
    server.end("front-end 0", KILLED)
    assert server.child(TRIALS).kinds() == ["front_end_lost", "link"]
    assert server.front_end(1).kinds() == ["trial", "trial_ready"]
    server.end("front-end 1", KILLED)
    assert server.child(TRIALS).kinds() == ["front_end_lost", "stop"]


def test_suspects_that_come_while_it_ends_get_a_new_one(server: Supervision) -> None:
    suspects(server, 0, 1)
    loaded(server)
    suspects(server, 0, 0)
    suspects(server, 1, 1)
    assert server.front_end(1).kinds() == []
    server.end(TRIALS, CLEAN)
    assert server.front_end(1).kinds() == ["trial"]
    assert server.launched.count(TRIALS) == 2


def test_all_front_ends_refuse_what_one_has_found(server: Supervision) -> None:
    server.say("front-end 0", "refuse", **REFUSAL)
    assert server.front_end(0).kinds() == []
    assert server.front_end(1).take() == [("refuse", REFUSAL)]
    server.end("front-end 1", KILLED)
    server.wait(0)
    assert ("refuse", REFUSAL) in server.front_end(1).take()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("suspects", {}),
        ("suspects", {"count": -1}),
        ("suspects", {"count": "1"}),
        ("suspects", {"count": 1, "more": 1}),
        ("refuse", {"digest": "d"}),
        ("refuse", {"digest": "d" * 65, "until": 1.0}),
        ("refuse", {"digest": "d", "until": "1"}),
    ],
)
def test_a_front_end_that_sends_nonsense_is_killed(
    server: Supervision, kind: str, fields: dict[str, object]
) -> None:
    server.say("front-end 0", kind, **fields)
    assert server.front_end(0).killed


def test_it_ends_with_the_server(server: Supervision) -> None:
    suspects(server, 0, 1)
    server.supervisor.on_signal(signal.SIGTERM)
    assert not server.child(TRIALS).killed
    server.wait(1.1)
    server.supervisor.on_signal(signal.SIGTERM)
    assert server.child(TRIALS).killed
    for name in server.alive():
        assert server.exit_status is None
        server.end(name, KILLED)
    assert server.exit_status is not None


def test_front_ends_that_drain_end_their_trials(server: Supervision) -> None:
    suspects(server, 0, 1)
    loaded(server)
    server.supervisor.on_signal(signal.SIGTERM)
    suspects(server, 0, 0)
    server.end("front-end 0", CLEAN)
    server.end("front-end 1", CLEAN)
    server.end(TRIALS, CLEAN)
    server.end("the engine", CLEAN)
    assert server.exit_status == 0
