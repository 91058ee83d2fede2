"""What follows from the requests that ran when a process ended, and the trial of a suspect."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from polling import PATIENCE
from support.models.controlled import run_in_thread

from tensorferry.server.processes.running_page import Running
from tensorferry.server.processes.suspect_requests import (
    CauseFinder,
    Findings,
    RefusedRequests,
    TrialLock,
    end_abandoned_trial,
)

ANN, BOB, NAMELESS = b"hash-ann", b"hash-bob", bytes(8)
SEGV, KILL = signal.SIGSEGV, signal.SIGKILL


def running(digest: int, owner: bytes = NAMELESS, *, tried: bool = False) -> Running:
    return Running(owner, digest.to_bytes(16, "big"), tried)


def name(digest: int) -> str:
    return digest.to_bytes(16, "big").hex()


def test_what_ran_is_suspect() -> None:
    findings = CauseFinder().after([running(1), running(2), running(1)], SEGV, 1000.0)
    assert findings == Findings(1600.0, (name(1), name(2)))
    # A request that ran alone by chance is, too; one that was tried alone is the cause.
    assert CauseFinder().after([running(1)], SEGV, 0.0) == Findings(600.0, (name(1),))
    assert CauseFinder().after([running(1, tried=True)], SEGV, 0.0) == Findings(600.0, (), name(1))


@pytest.mark.parametrize("number", [KILL, 0])
def test_sigkill_or_an_exit_needs_two_trials(number: int) -> None:
    """Both may have another cause, such as the machine's lack of memory."""
    suspects = CauseFinder()
    assert suspects.after([running(1, tried=True)], number, 0.0) == Findings(600.0)
    assert suspects.after([running(2, tried=True)], number, 0.0) == Findings(600.0)
    assert suspects.after([running(1, tried=True)], number, 1.0).refused == name(1)
    assert suspects.after([running(2, tried=True)], number, 601.0) == Findings(1201.0), (
        "the first was long ago"
    )


def test_a_request_that_was_tried_beside_others_needs_two_trials() -> None:
    """One of the others may be the cause of the first death, but hardly of both."""
    suspects = CauseFinder()
    first = suspects.after([running(1, tried=True), running(3)], SEGV, 0.0)
    assert (first.suspects, first.refused) == ((name(3),), "")
    assert suspects.after([running(4), running(1, tried=True)], SEGV, 1.0).refused == name(1)


class TestClients:
    def refused(self, suspects: CauseFinder, now: float, *owners: bytes) -> tuple[str, float]:
        """Return which client is refused after a process with its requests ended, and for how long."""
        requests = [running(index, owner) for index, owner in enumerate(owners)]
        findings = suspects.after(requests, SEGV, now)
        return findings.client, findings.client_until - now

    def test_the_only_client_of_three_deaths_is_refused_for_times_that_double(self) -> None:
        suspects, now, seconds = CauseFinder(), 0.0, []
        for _ in range(8):
            for owners in ((ANN, BOB), (ANN,)):
                assert self.refused(suspects, now, *owners)[0] == ""
            client, time = self.refused(suspects, now, ANN, NAMELESS)
            assert client == ANN.hex()
            seconds.append(time)
            now += 100.0
        assert seconds == [60, 120, 240, 480, 960, 1920, 3600, 3600]

    @pytest.mark.parametrize(
        "deaths", [[(ANN, BOB)] * 3, [(ANN,), (BOB,), (ANN,)], [(NAMELESS,)] * 3, [(ANN,), (), (ANN,)]]
    )
    def test_no_client_is_refused_that_is_not_the_only_one_of_all(
        self, deaths: list[tuple[bytes, ...]]
    ) -> None:
        suspects = CauseFinder()
        assert [self.refused(suspects, 0.0, *owners)[0] for owners in deaths] == ["", "", ""]

    def test_deaths_older_than_ten_minutes_do_not_count(self) -> None:
        suspects = CauseFinder()
        times = [0.0, 300.0, 601.0, 900.0]
        assert [self.refused(suspects, now, ANN)[0] for now in times] == ["", "", "", ANN.hex()]


class TestTrials:
    def test_one_process_tries_at_a_time(self, tmp_path: Path) -> None:
        first, second = (TrialLock(tmp_path, lambda: True) for _ in range(2))
        assert first.begin()
        assert not first.begin()
        assert not second.begin()
        first.end()
        assert second.begin()
        assert not first.begin()
        second.end()
        assert first.begin()
        first.end()

    def test_nothing_is_tried_unless_all_processes_serve(self, tmp_path: Path) -> None:
        serve = False
        trial = TrialLock(tmp_path, lambda: serve)
        assert not trial.begin()
        serve = True
        assert trial.begin()
        trial.end()

    def test_a_wait_ends_although_another_trial_begins_meanwhile(self, tmp_path: Path) -> None:
        """The end of that trial notifies no other process, so only the lock is waited for."""
        other = TrialLock(tmp_path, lambda: True)
        # Asked when nothing is tried.
        trial = TrialLock(tmp_path, lambda: other.begin() or True)
        run_in_thread(trial.await_free).result(PATIENCE)
        assert not trial.begin()
        other.end()

    def test_after_a_death_trials_begin_once_the_supervisor_permits_it(self, tmp_path: Path) -> None:
        program = (
            "import os, signal, sys\n"
            "from pathlib import Path\n"
            "from tensorferry.server.processes.suspect_requests import TrialLock\n"
            "assert TrialLock(Path(sys.argv[1]), lambda: True).begin()\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == -9
        trial = TrialLock(tmp_path, lambda: True)
        assert not trial.begin()
        end_abandoned_trial(tmp_path)
        assert trial.begin()
        trial.end()


def test_a_request_is_refused_for_its_time_and_the_oldest_of_too_many_is_forgotten() -> None:
    now = 0.0
    refused = RefusedRequests(lambda: now)
    assert not refused
    for number in range(1001):
        refused.add(str(number), 10.0)
    assert refused
    assert not refused.has_digest("0")
    assert refused.has_digest("1")
    now = 10.0
    assert not refused.has_digest("1")
