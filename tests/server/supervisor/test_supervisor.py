"""What follows each event of a child, of an operator or of the clock, in each state of the server."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.open_files import open_files
from support.server.supervision import (
    ABORTED,
    CLEAN,
    EXITED,
    KILLED,
    PORT,
    Supervision,
)

from tensorferry.server.supervisor.child import Ending
from tensorferry.server.supervisor.supervisor import EXIT_SECONDS

ENGINE = "the engine"
HEALTH = {"serving": {"": True}, "ready": True, "loaded": True}

Make = Callable[..., Supervision]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    before = open_files()
    yield lambda *arguments, **options: Supervision(tmp_path, *arguments, **options)
    assert not open_files() - before, "descriptors of links are left"


class TestStart:
    def test_every_process_is_started_and_gets_its_links(self, make: Make, tmp_path: Path) -> None:
        supervision = make()
        assert supervision.launched == [ENGINE, "front-end 0", "front-end 1"]
        address = f"127.0.0.1:{PORT}"
        common = {"generation": 1, "port": PORT, "address": address, "front_ends": 2, "log_levels": None}
        socket = str(tmp_path / "engine-1")
        assert supervision.engine.take() == [
            ("start", {**common, "socket": socket, "metrics_fd": None, "trial": False}),
            ("link", {"front_end": 0, "generation": 1}),
            ("link", {"front_end": 1, "generation": 1}),
        ]
        assert supervision.front_end(1).take() == [
            ("start", {**common, "front_end": 1}),
            ("link", {"engine": 1, "socket": socket}),
        ]
        assert supervision.links == 2

    def test_the_ready_line_is_printed_once_when_all_work(self, make: Make) -> None:
        supervision = make()
        supervision.listen(0)
        supervision.engine_ready(models=["m"])
        assert not supervision.ready_lines
        supervision.listen(1)
        ready, listening = {"models": ["m"]}, {"port": PORT, "transport": "lane"}
        assert supervision.ready_lines == [(f"127.0.0.1:{PORT}", ready, listening)]
        supervision.end(ENGINE, KILLED)
        supervision.wait(1)
        supervision.run()
        assert len(supervision.ready_lines) == 1

    def test_a_closed_stdout_does_not_end_the_server(self, make: Make, caplog: Any) -> None:
        supervision = make(1)
        supervision.stdout_is_closed = True
        supervision.run()
        assert supervision.exit_status is None
        assert "the ready line cannot be printed: BrokenPipeError('closed')" in caplog.text

    def test_health_is_sent_to_every_front_end_and_to_new_ones(self, make: Make) -> None:
        supervision = make().run()
        assert supervision.front_end(0).take("health") == [("health", HEALTH)]
        supervision.end("front-end 1", KILLED)
        supervision.wait(0)
        assert supervision.front_end(1).kinds() == ["start", "link", "health"]

    def test_log_levels_are_sent_to_every_front_end_and_to_all_later_processes(self, make: Make) -> None:
        supervision = make().run()
        supervision.forget()
        levels = {"info": False}
        supervision.say(ENGINE, "log_levels", levels=levels)
        for index in range(2):
            assert supervision.front_end(index).take() == [("log_levels", {"levels": levels})]
        for name in (ENGINE, "front-end 0"):
            supervision.end(name, KILLED)
            supervision.wait(0)
            (start,) = supervision.child(name).take("start")
            assert start[1]["log_levels"] == levels

    @pytest.mark.parametrize("name", [ENGINE, "front-end 0"])
    def test_a_start_error_ends_the_server(self, make: Make, name: str) -> None:
        supervision = make()
        supervision.say(name, "failed", message="no such model")
        assert supervision.errors == ["tensorferry serve: no such model"]
        assert all(supervision.child(name).killed for name in supervision.alive())
        assert supervision.exit_status is None
        supervision.end(name, EXITED)
        supervision.end_killed()
        assert supervision.exit_status == 1

    @pytest.mark.parametrize("name", [ENGINE, "front-end 0"])
    @pytest.mark.parametrize("ending", [EXITED, CLEAN])
    def test_a_child_that_exits_before_it_has_reported_ends_the_server(
        self, make: Make, name: str, ending: Ending
    ) -> None:
        supervision = make()
        supervision.end(name, ending)
        supervision.end_killed()
        assert supervision.exit_status == 1
        assert not supervision.alive()

    @pytest.mark.parametrize("name", [ENGINE, "front-end 1"])
    def test_a_child_that_is_killed_before_it_has_reported_is_replaced(self, make: Make, name: str) -> None:
        supervision = make()
        supervision.end(name, ABORTED)
        supervision.wait(0)
        assert supervision.process(name).generation == 2
        supervision.run()
        assert len(supervision.ready_lines) == 1

    def test_a_front_end_that_listened_is_replaced_while_the_engine_loads(self, make: Make) -> None:
        supervision = make()
        supervision.listen(0)
        supervision.end("front-end 0", EXITED)
        supervision.wait(0)
        assert supervision.front_end(0).kinds() == ["start", "link"]
        supervision.listen(1)
        supervision.engine_ready()
        assert not supervision.ready_lines
        supervision.listen(0)
        assert len(supervision.ready_lines) == 1

    @pytest.mark.parametrize("name", [ENGINE, "front-end 1"])
    def test_a_process_that_cannot_be_started_ends_the_server(self, make: Make, name: str) -> None:
        supervision = make(starts=False)
        supervision.unlaunchable.add(name)
        supervision.supervisor.start()
        supervision.end_killed()
        assert supervision.exit_status == 1
        assert not supervision.alive()


class TestFrontEndEnds:
    def test_another_is_started_at_once_with_a_new_link(self, make: Make, caplog: Any) -> None:
        supervision = make().run()
        supervision.forget()
        supervision.end("front-end 0", KILLED)
        assert supervision.engine.take() == [("front_end_lost", {"front_end": 0, "generation": 1})]
        supervision.wait(0)
        assert supervision.engine.take() == [("link", {"front_end": 0, "generation": 2})]
        assert supervision.front_end(0).take("link")[0][1]["engine"] == 1
        assert not supervision.front_end(1).take()
        assert "front-end 0 (process 2) ended: killed by SIGKILL; its connections are lost; " in caplog.text
        with caplog.at_level(logging.INFO):
            supervision.now += 0.5
            supervision.listen(0)
        assert "front-end 0 (process 4) serves again, 0.5 s after the last one ended" in caplog.text

    def test_starts_are_delayed_if_it_ends_again_and_again_before_it_listens(self, make: Make) -> None:
        supervision = make(1).run()
        delays = []
        for _ in range(10):
            supervision.end("front-end 0", KILLED)
            delays.append(round(supervision.process("front-end 0").start_at - supervision.now, 9))
            supervision.wait(delays[-1])
            supervision.wait(5)
        assert delays == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
        supervision.wait(10)
        supervision.end("front-end 0", KILLED)
        assert supervision.supervisor.next_time() == supervision.now

    @pytest.mark.parametrize("name", [ENGINE, "front-end 0"])
    def test_a_process_that_serves_is_back_soon_however_often_it_is_killed(
        self, make: Make, name: str
    ) -> None:
        supervision = make().run()
        for _ in range(100):
            supervision.end(name, KILLED)
            assert supervision.supervisor.next_time() <= supervision.now + 0.1
            supervision.wait(0.1)
            supervision.run()

    def test_a_start_error_is_logged_and_the_start_repeated(self, make: Make, caplog: Any) -> None:
        supervision = make().run()
        supervision.end("front-end 0", KILLED)
        supervision.wait(0)
        supervision.say("front-end 0", "failed", message="the certificate is invalid")
        supervision.end("front-end 0", EXITED)
        assert "front-end 0 (process 4) cannot serve: the certificate is invalid" in caplog.text
        supervision.wait(0.1)
        assert supervision.process("front-end 0").generation == 3
        assert supervision.exit_status is None

    def test_a_process_that_cannot_be_started_is_tried_again(self, make: Make, caplog: Any) -> None:
        supervision = make().run()
        supervision.unlaunchable.add("front-end 0")
        supervision.end("front-end 0", KILLED)
        supervision.wait(1)
        assert "it cannot be started: no memory" in caplog.text
        supervision.unlaunchable.clear()
        supervision.wait(10)
        assert supervision.front_end(0).kinds() == ["start", "link", "health"]

    def test_without_a_link_it_is_killed_and_tried_again(self, make: Make, caplog: Any) -> None:
        supervision = make().run()
        supervision.no_links = True
        supervision.end("front-end 0", KILLED)
        supervision.wait(0)
        assert supervision.front_end(0).killed
        assert "no link to the engine can be made: too many open files" in caplog.text
        supervision.no_links = False
        supervision.end("front-end 0", KILLED)
        supervision.wait(1)
        assert "link" in supervision.front_end(0).kinds()

    def test_the_descriptors_of_half_a_link_are_closed(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        supervision = make().run()
        supervision.end("front-end 0", KILLED)
        duplicates = iter([True, False])
        real = os.dup

        def dup(fd: int) -> int:
            if next(duplicates):
                return real(fd)
            raise OSError("too many open files")

        monkeypatch.setattr(os, "dup", dup)
        supervision.wait(0)
        assert supervision.front_end(0).killed


class TestEngineEnds:
    def test_front_ends_are_told_and_get_new_links(self, make: Make, tmp_path: Path, caplog: Any) -> None:
        supervision = make().run()
        supervision.forget()
        (tmp_path / "engine-1").touch()
        supervision.end(ENGINE, ABORTED)
        assert not (tmp_path / "engine-1").exists()
        for index in range(2):
            assert supervision.front_end(index).take() == [("engine_lost", {"engine": 1, "restarts": True})]
        supervision.wait(0)
        assert supervision.engine.kinds() == ["start", "link", "link"]
        link = {"engine": 2, "socket": str(tmp_path / "engine-2")}
        assert supervision.front_end(0).take() == [("link", link)]
        assert "the engine (process 1) ended: killed by SIGABRT" in caplog.text

    def test_a_front_end_that_starts_meanwhile_gets_no_old_health_and_one_link(self, make: Make) -> None:
        supervision = make().run()
        supervision.end(ENGINE, KILLED)
        supervision.end("front-end 0", KILLED)
        supervision.supervisor.on_time()
        assert supervision.front_end(0).kinds() == ["start", "link"]
        assert supervision.engine.kinds() == ["start", "link", "link"]
        supervision.engine_ready()
        assert supervision.front_end(0).take() == [("health", HEALTH)]

    def test_a_front_end_starts_without_a_link_while_the_engine_waits(self, make: Make) -> None:
        supervision = make(1).run()
        for _ in range(4):
            supervision.end(ENGINE, KILLED)
            supervision.wait(1)
        supervision.end(ENGINE, KILLED)
        supervision.end("front-end 0", KILLED)
        supervision.wait(0)
        assert supervision.front_end(0).kinds() == ["start"]
        supervision.wait(1)
        assert supervision.front_end(0).kinds() == ["link"]

    def test_a_model_that_cannot_be_loaded_again_is_logged_and_tried_again(
        self, make: Make, caplog: Any
    ) -> None:
        supervision = make().run()
        supervision.end(ENGINE, KILLED)
        supervision.wait(0)
        supervision.say(ENGINE, "failed", message="no such file")
        supervision.end(ENGINE, EXITED)
        assert "cannot serve: no such file" in caplog.text
        supervision.wait(0.1)
        assert supervision.engine.kinds()[0] == "start"
        assert supervision.exit_status is None

    def test_front_ends_without_a_link_are_replaced(self, make: Make) -> None:
        supervision = make().run()
        supervision.no_links = True
        supervision.end(ENGINE, KILLED)
        supervision.wait(0)
        assert supervision.front_end(0).killed
        assert supervision.front_end(1).killed
        supervision.no_links = False
        supervision.end_killed()
        supervision.wait(0)
        assert supervision.front_end(0).kinds() == ["start", "link"]


class TestMessages:
    @pytest.mark.parametrize(
        ("name", "kind", "fields"),
        [
            ("front-end 0", "ready", {}),
            ("front-end 0", "health", HEALTH),
            ("front-end 0", "listening", {}),
            ("front-end 0", "listening", {"port": 1}),
            ("front-end 0", "drain", {}),
            (ENGINE, "listening", {"port": PORT}),
            (ENGINE, "health", {}),
            (ENGINE, "health", {**HEALTH, "more": [[]]}),
            (ENGINE, "health", {"serving": {"m": 1}, "ready": True, "loaded": True}),
            (ENGINE, "health", {"serving": {}, "ready": None, "loaded": True}),
            (ENGINE, "front_end_broken", {"front_end": 2, "generation": 1}),
            (ENGINE, "front_end_broken", {}),
            (ENGINE, "log_levels", {}),
            ("front-end 0", "log_levels", {"levels": {}}),
            ("front-end 0", "front_end_broken", {"front_end": 1, "generation": 1}),
            (ENGINE, "x" * 1000, {}),
        ],
    )
    def test_a_child_with_an_unknown_message_is_killed(
        self, make: Make, caplog: Any, name: str, kind: str, fields: dict[str, Any]
    ) -> None:
        supervision = make()
        supervision.say(name, kind, **fields)
        assert supervision.child(name).killed
        assert len(caplog.text) < 500
        supervision.end(name, KILLED)
        supervision.wait(0)
        assert supervision.process(name).generation == 2

    def test_a_front_end_that_broke_its_link_is_replaced(self, make: Make, caplog: Any) -> None:
        supervision = make().run()
        supervision.say(ENGINE, "front_end_broken", front_end=1, generation=1)
        assert supervision.front_end(1).killed
        supervision.end_killed()
        supervision.wait(0)
        # The message of an engine that has not read yet that the process was replaced.
        supervision.say(ENGINE, "front_end_broken", front_end=1, generation=1)
        assert not supervision.front_end(1).killed
        assert not supervision.engine.killed
        supervision.say(ENGINE, "front_end_broken", front_end=1)
        assert supervision.front_end(1).killed
        assert "front-end 1 (process 3) is killed, because it broke the rules of its link" in caplog.text

    def test_a_child_that_closes_its_channel_has_some_time_to_end(self, make: Make) -> None:
        supervision = make().run()
        supervision.supervisor.on_channel_closed(supervision.process(ENGINE))
        supervision.wait(EXIT_SECONDS - 1)
        assert not supervision.engine.killed
        supervision.wait(1)
        assert supervision.engine.killed
        supervision.end_killed()
        supervision.wait(60)
        assert not supervision.engine.killed

    def test_the_engine_is_told_of_every_process(self, make: Make) -> None:
        supervision = make(1).run()

        def states() -> list[tuple[str, str, int | None, int]]:
            _, fields = supervision.engine.take("processes")[-1]
            return [(p["name"], p["state"], p["pid"], p["restarts"]) for p in fields["processes"]]

        assert states() == [(ENGINE, "serving", 1, 0), ("front-end 0", "serving", 2, 0)]
        supervision.end("front-end 0", KILLED)
        assert states()[1] == ("front-end 0", "waiting", None, 0)
        supervision.wait(0)
        assert states()[1] == ("front-end 0", "starting", 3, 1)
        supervision.say(ENGINE, "health", **HEALTH)
        assert not supervision.engine.take("processes")
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.end("front-end 0", CLEAN)
        assert states()[1] == ("front-end 0", "ended", None, 1)


class TestDrain:
    def test_all_drain_and_the_engine_ends_last(self, make: Make, caplog: Any) -> None:
        supervision = make(drain_seconds=30.0, drain_delay=5.0).run()
        supervision.forget()
        caplog.set_level(logging.INFO)
        supervision.supervisor.on_signal(signal.SIGTERM)
        drain = ("drain", {"seconds": 30.0, "delay": 5.0})
        assert supervision.front_end(0).take() == [drain]
        assert supervision.front_end(1).take() == [drain]
        assert supervision.engine.take() == [drain]
        supervision.wait(10)
        supervision.end("front-end 0", CLEAN)
        assert supervision.engine.kinds() == ["front_end_lost"]
        supervision.end("front-end 1", CLEAN)
        lost = ("front_end_lost", {"front_end": 1, "generation": 1})
        assert supervision.engine.take() == [lost, ("stop", {})]
        supervision.wait(1)
        supervision.end(ENGINE, CLEAN)
        assert supervision.exit_status == 0
        assert "SIGTERM received: requests are accepted for 5 s more" in caplog.text
        assert "SIGTERM received: draining for at most 30 s" in caplog.text
        assert not [line for line in caplog.records if line.levelno > logging.INFO]

    def test_children_that_do_not_end_are_killed(self, make: Make) -> None:
        supervision = make(1, drain_seconds=30.0).run()
        supervision.supervisor.on_signal(signal.SIGINT)
        supervision.wait(30 + EXIT_SECONDS - 0.1)
        assert not supervision.front_end(0).killed
        supervision.wait(0.1)
        assert supervision.front_end(0).killed
        supervision.end_killed()
        assert supervision.engine.take("stop") == [("stop", {})]
        supervision.wait(EXIT_SECONDS - 0.1)
        assert not supervision.engine.killed
        supervision.wait(0.1)
        assert supervision.engine.killed
        supervision.end_killed()
        assert supervision.exit_status == 0

    def test_signals_within_a_second_are_one(self, make: Make) -> None:
        supervision = make(1).run()
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.wait(1.0)
        supervision.supervisor.on_signal(signal.SIGTERM)
        assert not supervision.front_end(0).killed
        supervision.end("front-end 0", CLEAN)
        supervision.end(ENGINE, CLEAN)
        assert supervision.exit_status == 0

    def test_a_second_signal_ends_all_at_once(self, make: Make, caplog: Any) -> None:
        supervision = make().run()
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.wait(1.1)
        supervision.supervisor.on_signal(signal.SIGINT)
        assert all(supervision.child(name).killed for name in supervision.alive())
        supervision.supervisor.on_signal(signal.SIGINT)
        supervision.end_killed()
        assert supervision.exit_status == 128 + signal.SIGINT
        assert "SIGINT received again: stopping at once" in caplog.text

    def test_a_second_signal_while_the_engine_ends(self, make: Make) -> None:
        supervision = make(1).run()
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.end("front-end 0", CLEAN)
        supervision.wait(1.1)
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.end_killed()
        assert supervision.exit_status == 128 + signal.SIGTERM

    def test_a_killed_child_that_hangs_does_not_keep_the_supervisor(self, make: Make) -> None:
        supervision = make().run()
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.wait(1.1)
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.wait(60)
        assert supervision.exit_status == 128 + signal.SIGTERM
        assert supervision.now <= 1004.1

    def test_a_signal_during_the_start(self, make: Make) -> None:
        supervision = make()
        supervision.listen(0)
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.end("front-end 0", CLEAN)
        supervision.end("front-end 1", CLEAN)
        supervision.end(ENGINE, CLEAN)
        assert supervision.exit_status == 0
        assert not supervision.ready_lines

    def test_a_start_error_after_the_signal_does_not_matter(self, make: Make) -> None:
        supervision = make(1)
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.say(ENGINE, "failed", message="no such file")
        supervision.end(ENGINE, EXITED)
        supervision.end("front-end 0", EXITED)
        assert supervision.exit_status == 0

    def test_front_ends_that_wait_for_their_start_are_not_started(self, make: Make) -> None:
        supervision = make().run()
        supervision.end("front-end 0", KILLED)
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.wait(1)
        assert supervision.alive() == [ENGINE, "front-end 1"]
        supervision.end("front-end 1", KILLED)
        supervision.end(ENGINE, CLEAN)
        assert supervision.exit_status == 0

    def test_without_a_front_end_the_engine_stops_at_once(self, make: Make) -> None:
        supervision = make(1).run()
        supervision.end("front-end 0", KILLED)
        supervision.supervisor.on_signal(signal.SIGTERM)
        assert supervision.engine.take("stop") == [("stop", {})]

    def test_without_a_child_it_ends_at_once(self, make: Make) -> None:
        supervision = make(1).run()
        supervision.end("front-end 0", KILLED)
        supervision.end(ENGINE, KILLED)
        supervision.supervisor.on_signal(signal.SIGTERM)
        assert supervision.exit_status == 0

    def test_the_engine_is_replaced_while_front_ends_finish_their_calls(self, make: Make) -> None:
        supervision = make(1).run()
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.forget()
        supervision.end(ENGINE, KILLED)
        supervision.wait(0)
        assert supervision.front_end(0).take() == [
            ("engine_lost", {"engine": 1, "restarts": True}),
            ("link", {"engine": 2, "socket": supervision.engine.take("start")[0][1]["socket"]}),
        ]
        supervision.end("front-end 0", CLEAN)
        supervision.end(ENGINE, CLEAN)
        assert supervision.exit_status == 0

    def test_an_engine_that_waits_for_its_start_is_not_started_after_the_last_front_end(
        self, make: Make
    ) -> None:
        supervision = make(1).run()
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.end(ENGINE, KILLED)
        supervision.end("front-end 0", CLEAN)
        assert supervision.exit_status == 0

    def test_the_engine_is_not_replaced_when_it_ends_last(self, make: Make, caplog: Any) -> None:
        supervision = make(1).run()
        supervision.supervisor.on_signal(signal.SIGTERM)
        supervision.end("front-end 0", KILLED)
        supervision.end(ENGINE, ABORTED)
        assert supervision.exit_status == 0
        assert "the engine (process 1) ended: killed by SIGABRT" in caplog.text


def test_no_message_stops_the_supervisor(make: Make) -> None:
    random = Random(7)
    values: list[Any] = [
        None,
        True,
        0,
        1,
        -1,
        0.5,
        10**400,
        "",
        "\ud800",
        [],
        [[0]],
        {},
        {"": True},
        {"m": {}},
    ]
    names = ["message", "port", "serving", "ready", "front_end", "generation", "levels", "more"]
    kinds = [
        "failed",
        "ready",
        "listening",
        "health",
        "front_end_broken",
        "log_levels",
        "pong",
        "start",
        "link",
        "\ud800",
        "",
    ]
    supervision = make().run()
    for _ in range(3000):
        name = random.choice(supervision.alive())
        fields = {random.choice(names): random.choice(values) for _ in range(random.randint(0, 4))}
        supervision.say(name, random.choice(kinds), **fields)
        supervision.end_killed()
        supervision.wait(11)
    assert supervision.exit_status is None


@pytest.mark.parametrize("seed", range(200))
def test_any_order_of_events(make: Make, seed: int) -> None:
    """Links always join the two living processes, and the server always ends when it is asked to."""
    random = Random(seed)
    supervision = make(random.randint(1, 3), drain_delay=random.choice([0.0, 3.0]))
    signals = 0
    for _ in range(random.randint(1, 80)):
        if supervision.exit_status is not None:
            break
        alive = supervision.alive()
        name = random.choice(alive) if alive else None
        match random.choice(["end", "report", "wait", "wait", "wait", "health", "bad", "failed", "closed"]):
            case "end" if name:
                supervision.end(name, random.choice([KILLED, ABORTED, EXITED, CLEAN]))
            case "report" if name:
                supervision.run()
            case "health" if ENGINE in alive:
                supervision.say(ENGINE, "health", **HEALTH)
            case "bad" if name:
                supervision.say(name, "nonsense")
            case "failed" if name and supervision.ready_lines:
                supervision.say(name, "failed", message="m")
            case "closed" if name:
                supervision.supervisor.on_channel_closed(supervision.process(name))
            case "wait":
                supervision.wait(random.choice([0, 0.1, 1, 20]))
                supervision.end_killed()
        if random.random() < 0.01:
            signals += 1
            supervision.supervisor.on_signal(signal.SIGTERM)
        _check_links(supervision)
    if supervision.exit_status is None:
        supervision.supervisor.on_signal(signal.SIGTERM)
        for _ in range(10):
            supervision.wait(60)
            supervision.end_killed()
        assert supervision.exit_status is not None
    assert supervision.exit_status in (0, 1, 128 + signal.SIGTERM)
    if supervision.exit_status == 0:
        assert not supervision.alive()


def _check_links(supervision: Supervision) -> None:
    """Each living pair of processes has the same last link."""
    alive = supervision.alive()
    if ENGINE not in alive:
        return
    engine = supervision.process(ENGINE)
    links = {f["front_end"]: f["generation"] for kind, f in supervision.engine.sent if kind == "link"}
    for name in alive:
        process = supervision.process(name)
        if process is engine:
            continue
        assert links[process.index] == process.generation
        theirs = [fields["engine"] for kind, fields in supervision.child(name).sent if kind == "link"]
        assert theirs[-1] == engine.generation
        assert theirs == sorted(set(theirs))
