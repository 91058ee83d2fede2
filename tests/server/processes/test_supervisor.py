"""What follows each event of a server process, of an operator or of the clock, in each state of the server."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.open_files import open_files
from support.server.supervision import CLEAN, CRASHED, EXITED, KILLED, Supervision

from tensorferry.server.processes.child import ExitStatus
from tensorferry.server.processes.running_page import Running
from tensorferry.server.processes.supervisor import EXIT_SECONDS

Make = Callable[..., Supervision]
Caplog = pytest.LogCaptureFixture

DRAIN: tuple[str, dict[str, Any]] = ("drain", {})
MARKED = Running(b"owner___", b"a mark of 16 by.", tried=False)


@pytest.fixture
def make(tmp_path: Path, caplog: Caplog) -> Iterator[Make]:
    caplog.set_level(logging.INFO)
    before = open_files()
    made = []

    def make(*arguments: Any, **options: Any) -> Supervision:
        made.append(Supervision(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for supervision in made:
        supervision.supervisor.close()
    assert not open_files() - before


class TestStart:
    def test_one_process_prints_the_ready_line_when_all_are_ready(self, make: Make) -> None:
        supervision = make()
        supervision.ready(1)
        supervision.say(1, "ready")
        assert not supervision.child(1).kinds()
        supervision.say(0, "ready")
        assert [supervision.child(index).kinds() for index in range(2)] == [["print_ready"], []]
        supervision.end(0, KILLED)
        supervision.wait(0)
        supervision.say(0, "ready")
        assert supervision.child(0).kinds() == ["start"]

    @pytest.mark.parametrize("failed", [True, False])
    def test_a_process_that_ends_before_it_is_ready_ends_the_server(self, make: Make, failed: bool) -> None:
        supervision = make()
        if failed:
            supervision.say(0, "failed", message="no such\nmodel")
            assert supervision.errors == ["tensorferry serve: no such\n    model"]
        supervision.end(0, EXITED)
        assert supervision.child(1).killed
        assert supervision.exit_status is None
        supervision.end_killed()
        assert supervision.exit_status == 1

    def test_a_process_that_is_killed_before_it_is_ready_is_replaced(self, make: Make) -> None:
        supervision = make()
        supervision.end(1, KILLED)
        supervision.wait(0)
        ((_, start),) = supervision.child(1).take("start")
        # It takes no connections while its models load, because the other process serves.
        assert not start["listens_first"]

    def test_processes_that_cannot_be_started_end_the_server(self, make: Make) -> None:
        supervision = make(launches=False)
        assert (supervision.exit_status, list(supervision.slots)) == (1, [0])


class TestEnd:
    def test_another_is_started_at_once(self, make: Make, caplog: Caplog) -> None:
        supervision = make().ready()
        supervision.end(0, KILLED)
        supervision.wait(0)
        ((_, start),) = supervision.child(0).take("start")
        assert not start["listens_first"]
        assert "server 0 (process 1) ended: killed by SIGKILL; its calls fail with UNAVAILABLE" in caplog.text
        supervision.now += 0.5
        supervision.ready(0)
        assert "server 0 (process 3) serves again, 0.5 s after the last one ended" in caplog.text
        assert not supervision.child(1).take()

    def test_starts_are_delayed_after_processes_that_were_never_ready(self, make: Make) -> None:
        supervision = make().ready()
        delays = []
        for _ in range(4):
            supervision.end(0, EXITED)
            delays.append(round(supervision.slots[0].start_at - supervision.now, 9))
            supervision.wait(delays[-1])
        assert delays == [0, 0.1, 0.2, 0.4]
        assert supervision.exit_status is None

    def test_a_process_that_cannot_serve_again_is_logged_and_replaced(
        self, make: Make, caplog: Caplog
    ) -> None:
        supervision = make().ready()
        supervision.end(0, KILLED)
        supervision.wait(0)
        supervision.say(0, "failed", message="no such file")
        assert "server 0 (process 3) cannot serve: no such file" in caplog.text
        supervision.wait(EXIT_SECONDS)
        assert supervision.child(0).killed
        supervision.end_killed()
        supervision.wait(1)
        assert supervision.slots[0].generation == 3

    def test_a_start_that_fails_is_repeated(self, make: Make, caplog: Caplog) -> None:
        supervision = make().ready()
        supervision.launches = False
        supervision.end(0, KILLED)
        supervision.wait(1)
        assert "server 0 ended: it cannot be started: no memory" in caplog.text
        supervision.launches = True
        supervision.wait(10)
        assert supervision.child(0).kinds() == ["start"]


class TestMessages:
    def test_an_unknown_message_kills_the_process(self, make: Make, caplog: Caplog) -> None:
        supervision = make().ready()
        supervision.say(1, "x" * 1000)
        assert supervision.child(1).killed
        assert "server 1 (process 2) is killed, because its control channel is unusable (bug)" in caplog.text
        assert len(caplog.text) < 500

    def test_a_process_that_closes_its_channel_has_some_time_to_end(self, make: Make) -> None:
        supervision = make().ready()
        supervision.supervisor.on_channel_closed(supervision.slots[0])
        supervision.wait(EXIT_SECONDS - 1)
        assert not supervision.child(0).killed
        supervision.wait(1)
        assert supervision.child(0).killed

    def test_changes_of_the_processes_are_sent_to_all(self, make: Make) -> None:
        supervision = make()

        def published() -> list[tuple[str, str, int | None, int]]:
            ((_, fields),) = supervision.child(1).take("processes")
            return [(p["name"], p["state"], p["pid"], p["restarts"]) for p in fields["processes"]]

        second = ("server 1", "starting", 2, 0)
        assert published() == [("server 0", "starting", 1, 0), second]
        supervision.say(0, "ready")
        assert published() == [("server 0", "serving", 1, 0), second]
        supervision.end(0, KILLED)
        assert published() == [("server 0", "waiting", None, 0), second]
        supervision.wait(0)
        assert published() == [("server 0", "starting", 3, 1), second]
        supervision.wait(60)
        assert not supervision.child(1).take("processes")


class TestDrain:
    def test_all_drain_and_the_server_ends_with_the_last(self, make: Make, caplog: Caplog) -> None:
        shared = socket.create_server(("127.0.0.1", 0))
        supervision = make(drain_delay=5.0, sockets={"http": shared}).ready()
        supervision.supervisor.on_signal(signal.SIGTERM)
        # So that the port is closed once the processes close it.
        assert shared.fileno() == -1
        assert [supervision.child(index).take() for index in range(2)] == [[DRAIN], [DRAIN]]
        supervision.end(0, CLEAN)
        supervision.wait(1)
        assert supervision.exit_status is None
        supervision.end(1, CLEAN)
        assert supervision.exit_status == 0
        assert "SIGTERM received: requests are accepted for 5 s more" in caplog.text
        assert "SIGTERM received: draining for at most 30 s" in caplog.text
        assert not [line for line in caplog.records if line.levelno > logging.INFO]

    def test_a_process_that_does_not_end_is_killed(self, make: Make) -> None:
        supervision = make(1, drain_seconds=30.0, drain_delay=5.0).ready()
        supervision.supervisor.on_signal(signal.SIGINT)
        supervision.wait(35 + EXIT_SECONDS - 0.1)
        assert not supervision.child(0).killed
        supervision.wait(0.1)
        assert supervision.child(0).killed
        supervision.end_killed()
        assert supervision.exit_status == 0

    @pytest.mark.parametrize("during_start", [False, True])
    def test_a_second_signal_ends_all_at_once(self, make: Make, during_start: bool) -> None:
        supervision = make()
        if not during_start:
            supervision.ready()
        supervision.supervisor.on_signal(signal.SIGTERM)
        # One Ctrl-C can arrive twice.
        supervision.wait(1.0)
        supervision.supervisor.on_signal(signal.SIGTERM)
        assert not supervision.child(0).killed
        supervision.wait(1.1)
        supervision.supervisor.on_signal(signal.SIGINT)
        assert supervision.child(0).killed
        supervision.end(0, KILLED)
        # The other one hangs in a driver.
        assert supervision.exit_status is None
        supervision.wait(2)
        assert supervision.exit_status == 128 + signal.SIGINT


class TestReplacing:
    def replaced(self, supervision: Supervision, index: int) -> None:
        """Let a process that was told to drain end, and the next one be ready."""
        assert supervision.child(index).take() == [DRAIN]
        supervision.end(index, CLEAN)
        assert supervision.child(index).kinds() == ["start"]
        supervision.say(index, "ready")

    def test_sighup_replaces_one_process_after_the_other(self, make: Make, caplog: Caplog) -> None:
        supervision = make().ready()
        supervision.supervisor.on_signal(signal.SIGHUP)
        for index in range(2):
            assert not supervision.child(1 - index).take()
            self.replaced(supervision, index)
        assert "every process has been replaced" in caplog.text
        assert [supervision.slots[index].generation for index in range(2)] == [2, 2]

    def test_a_second_sighup_replaces_the_processes_of_the_first_too(self, make: Make) -> None:
        supervision = make().ready()
        supervision.supervisor.on_signal(signal.SIGHUP)
        supervision.supervisor.on_signal(signal.SIGHUP)
        # The process of the first signal may have read the files before the second.
        for index in (0, 0, 1):
            self.replaced(supervision, index)
        assert not supervision.child(0).take()

    def test_a_process_that_does_not_start_ends_the_replacing(self, make: Make, caplog: Caplog) -> None:
        supervision = make().ready()
        supervision.supervisor.on_signal(signal.SIGHUP)
        supervision.end(0, CLEAN)
        supervision.say(0, "failed", message="no such file")
        supervision.end(0, EXITED)
        assert "server 0 did not start, so the others are not replaced" in caplog.text
        supervision.wait(10)
        supervision.ready(0)
        assert not supervision.child(1).take()

    def test_a_process_that_is_being_started_is_replaced_when_it_is_ready(self, make: Make) -> None:
        supervision = make().ready()
        supervision.end(0, KILLED)
        supervision.wait(0)
        supervision.forget()
        supervision.supervisor.on_signal(signal.SIGHUP)
        assert not supervision.child(0).take()
        supervision.say(0, "ready")
        for index in range(2):
            self.replaced(supervision, index)

    @pytest.mark.parametrize("draining", [False, True])
    def test_nothing_is_replaced_during_the_start_and_the_drain(
        self, make: Make, caplog: Caplog, draining: bool
    ) -> None:
        supervision = make()
        if draining:
            supervision.ready().supervisor.on_signal(signal.SIGTERM)
        supervision.forget()
        supervision.supervisor.on_signal(signal.SIGHUP)
        assert not supervision.child(0).take()
        assert "SIGHUP received: nothing is replaced" in caplog.text


class TestCrashes:
    def test_the_marks_of_what_ran_are_sent_to_all_and_to_later_processes(self, make: Make) -> None:
        supervision = make().ready()
        supervision.note_running(0, [MARKED, MARKED])
        supervision.end(0, CRASHED)
        ((kind, findings),) = supervision.child(1).take()
        assert (kind, list(findings["suspects"])) == ("findings", [MARKED.digest.hex()])
        supervision.wait(0)
        assert supervision.child(0).take("findings") == [(kind, findings)]
        supervision.ready(0)
        supervision.wait(600)
        # The page of the process that ended is empty, and its findings are too old.
        supervision.end(0, CRASHED)
        supervision.wait(0)
        assert supervision.child(0).kinds() == ["start"]
        assert not supervision.child(1).take()

    def test_a_client_that_is_refused_for_longer_than_requests_is_known_to_later_processes(
        self, make: Make
    ) -> None:
        supervision, refused = make().ready(), 0.0
        # 60 s, 120 s, 240 s, 480 s and then 960 s.
        while refused < supervision.now + 660:
            supervision.note_running(0, [MARKED])
            supervision.end(0, CRASHED)
            ((_, findings),) = supervision.child(1).take("findings")
            refused = findings["client_until"] if findings["client"] else 0.0
            supervision.wait(20)
            supervision.ready(0)
        supervision.wait(620)
        supervision.end(1, KILLED)
        supervision.wait(0)
        assert supervision.child(1).take("findings")[-1] == ("findings", findings)

    @pytest.mark.parametrize(("status", "found"), [(EXITED, 0), (CLEAN, 0), (KILLED, 0), (CRASHED, 1)])
    def test_requests_that_outlast_a_drain_are_not_its_cause(
        self, make: Make, status: ExitStatus, found: int
    ) -> None:
        supervision = make().ready()
        supervision.supervisor.on_signal(signal.SIGHUP)
        # The second one was not told to drain.
        for expected in (found, 1):
            supervision.note_running(0, [MARKED])
            supervision.end(0, status)
            assert len(supervision.child(1).take("findings")) == expected


class TestHeartbeats:
    @pytest.mark.parametrize(("busy", "pings"), [({}, 3), ({"running": [MARKED]}, 30), ({"loads": True}, 30)])
    def test_a_process_that_does_not_answer_is_killed(
        self, make: Make, caplog: Caplog, busy: dict[str, Any], pings: int
    ) -> None:
        supervision = make()
        for index in range(2):
            supervision.child(index).hangs = True
        # One that is not ready is not asked.
        supervision.ready(0)
        supervision.note_running(0, **busy)
        supervision.wait(pings * 10 + 9)
        assert not supervision.child(0).killed
        supervision.wait(1)
        assert supervision.child(0).killed
        assert f"because it has not answered for {pings}0 s" in caplog.text
        assert not supervision.child(1).killed


@pytest.mark.parametrize("seed", range(50))
def test_any_order_of_events(make: Make, seed: int) -> None:
    """The server ends whenever it is asked to, and until then each process is living or will be started."""
    random = Random(seed)
    supervision = make(random.randint(1, 3), drain_delay=random.choice([0.0, 3.0])).ready()
    for _ in range(random.randint(1, 80)):
        alive = supervision.alive()
        index = random.choice(alive) if alive else None
        match random.choice(["end", "ready", "wait", "wait", "wait", "bad", "failed", "closed", "replace"]):
            case "end" if index is not None:
                supervision.end(index, random.choice([KILLED, CRASHED, EXITED, CLEAN]))
            case "ready" if index is not None:
                supervision.say(index, "ready")
            case "bad" if index is not None:
                values: list[Any] = [None, -1, 10**400, "", "\ud800", [[0]]]
                supervision.say(index, random.choice(["", "start", "\ud800"]), value=random.choice(values))
            case "failed" if index is not None:
                supervision.say(index, "failed", message=random.choice([None, "m", [1]]))
            case "closed" if index is not None:
                supervision.supervisor.on_channel_closed(supervision.slots[index])
            case "replace":
                supervision.supervisor.on_signal(signal.SIGHUP)
            case "wait":
                supervision.wait(random.choice([0, 0.1, 1, 20]))
                supervision.end_killed()
        assert supervision.exit_status is None
        for slot in supervision.slots.values():
            assert slot.child is not None or slot.start_at <= supervision.now + 10
    supervision.supervisor.on_signal(signal.SIGTERM)
    for _ in range(3):
        supervision.wait(60)
        supervision.end_killed()
    assert supervision.exit_status == 0
    assert not supervision.alive()
