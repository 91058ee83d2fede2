"""Deaths of child processes: who is blamed, what runs again, and what becomes of processes when the server dies."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from polling import PATIENCE, until
from server.processes.functions.conftest import APP, Start
from server.processes.functions.test_runs import command
from support.models.controlled import run_in_thread
from support.open_files import open_files
from support.processes.observed import own_children

from tensorferry.server.processes import child
from tensorferry.server.processes.functions import function_child, worker_process
from tensorferry.server.processes.functions.errors import ProcessDied, ProcessNotStarted, RequestRefused
from tensorferry.server.processes.functions.values import digest_of_inputs
from tensorferry.server.processes.functions.worker_process import WorkerProcess
from tensorferry.server.processes.suspect_requests import REFUSED, RefusedRequests

DEATHS = [
    ("os._exit 3", "exit status 3"),
    ("kill 9", "killed by SIGKILL"),
    ("segfault", "killed by SIGSEGV"),
    ("fork_and_exit", "exit status 5"),
    ("close_files", "killed by SIGKILL"),
]


@pytest.mark.parametrize(("act", "how"), DEATHS)
def test_a_lone_request_that_ends_its_process_is_refused_afterwards(
    started: Start, act: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    process = started()
    with pytest.raises(ProcessDied, match=REFUSED) as caught:
        process.run(command(act))
    assert caught.value.reason == f"the process that ran it ended ({how})"
    assert f"it ended ({how}) while it ran one request (hash " in caplog.text
    with pytest.raises(RequestRefused, match=REFUSED):
        process.run(command(act))
    assert process.run(command("pid")).tolist() == [process.pid]
    # A request that may have been killed from outside ran twice.
    assert process.restarts == (2 if "SIGKILL" in how else 1)


def test_requests_of_a_batch_are_not_refused(started: Start, caplog: pytest.LogCaptureFixture) -> None:
    process = started()
    with pytest.raises(ProcessDied, match=r"^the process that ran the batch ended$"):
        process.run(command("a", "os._exit 3"), [1, 1])
    assert "while it ran a batch of 2 requests; they run again in parts" in caplog.text
    with pytest.raises(ProcessDied, match=REFUSED):
        process.run(command("os._exit 3"), [1])


def test_a_refused_request_is_found_in_a_batch(started: Start) -> None:
    refused = RefusedRequests()
    with pytest.raises(ProcessDied):
        started(refused=refused).run(command("b", "os._exit 3"), [2])
    other = started(refused=refused)
    with pytest.raises(RequestRefused):
        other.run(command("b", "os._exit 3", "a"), [2, 1])
    assert other.restarts == 0
    assert other.run(command("b", "a"), [1, 1]).tolist() == [other.pid] * 2
    assert other.run(command("b"), [1]).tolist() == [other.pid]


def test_a_lone_request_whose_process_is_killed_from_outside_runs_again(
    started: Start, tmp_path: Path
) -> None:
    process = started()
    got = process.run(command(f"kill_once {tmp_path / 'killed'}"))
    assert got.tolist() == [process.pid]
    assert process.restarts == 1


def test_a_stream_that_has_begun_is_not_refused(started: Start) -> None:
    """An equal request ended another process meanwhile."""
    refused, x = RefusedRequests(), {"x": np.ones(1)}
    process = started("twice", refused=refused)
    answers = process.answers(x)
    assert answers.read().tolist() == [1]
    refused.add(digest_of_inputs("twice", x), math.inf)
    assert answers.read().tolist() == [1]
    answers.close()
    with pytest.raises(RequestRefused):
        process.answers(x).read()


@pytest.mark.parametrize("act", ["read", "close"])
def test_a_stream_whose_process_is_killed_from_outside_fails_and_is_not_refused(
    started: Start, act: str
) -> None:
    process, x = started("twice"), {"x": np.ones(1)}
    answers = process.answers(x)
    answers.read()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match="its process was killed before the last answer"):
        getattr(answers, act)()
    assert process.answers(x).read().tolist() == [1]


def test_a_process_that_ended_between_two_batches_costs_none(
    started: Start, caplog: pytest.LogCaptureFixture
) -> None:
    process = started()
    process.start()
    assert process.pid is not None
    pidfd = os.pidfd_open(process.pid)
    try:
        os.kill(process.pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], PATIENCE)[0]
    finally:
        os.close(pidfd)
    assert process.run(command("a"), [1]).tolist() == [process.pid]
    assert process.restarts == 1
    assert "between two batches" in caplog.text


def test_a_run_that_hangs_is_ended(started: Start, tmp_path: Path) -> None:
    process, began = started(), tmp_path / "began"
    run = run_in_thread(lambda: process.run(command(f"hang {began}")))
    until(began.exists)
    process.end_runs()
    assert "was ended" in str(run.exception(PATIENCE))
    with pytest.raises(ProcessDied, match="was ended"):
        process.run(command("a"))
    process.allow_runs()
    assert process.run(command("a")).tolist() == [process.pid]
    # It is not blamed.
    assert process.restarts == 1


def test_close_ends_a_run_that_hangs(started: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_CLOSE_SECONDS", 0.01)
    process, began = started(), tmp_path / "began"
    run = run_in_thread(lambda: process.run(command(f"hang {began}")))
    until(began.exists)
    process.close()
    assert isinstance(run.exception(PATIENCE), ProcessDied)
    with pytest.raises(ProcessDied):
        process.run(command("a"))
    with pytest.raises(ProcessDied):
        process.start()


def test_a_failure_of_the_server_during_a_run_does_not_mix_up_answers(
    started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started("echo")
    x = {"x": np.zeros(1)}
    for module, broken, restarts in ((function_child, "encode", 0), (child, "select", 1)):
        process.start()
        with monkeypatch.context() as patch:
            # Neither can be used then.
            patch.setattr(module, broken, None)
            with pytest.raises((TypeError, AttributeError)):
                process.run({"x": np.ones(1)})
        assert process.run(x)["x"].tolist() == [0]
        assert process.restarts == restarts


def test_no_file_is_left_if_a_process_cannot_be_started(
    started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/absent")
    with pytest.raises(ProcessNotStarted) as caught:
        started().start()
    assert "No such file or directory: '/absent'" in caught.value.reason


def test_a_process_that_is_not_closed_ends_with_the_last_reference() -> None:
    before, children = open_files(), own_children()
    process = WorkerProcess(APP, "act", name="model act")
    process.start()
    del process
    assert not open_files() - before
    assert not own_children() - children


PARENT = """
import sys, threading
from pathlib import Path
import numpy as np
from tensorferry.server.processes.functions.worker_process import WorkerProcess
process = WorkerProcess(Path(sys.argv[1]), "act", name="m")
process.start()
threading.Thread(target=process.run, args=({"command": np.array([sys.argv[2]], object)},), daemon=True).start()
print(process.pid, flush=True)
threading.Event().wait()
"""


def test_a_process_that_hangs_in_native_code_ends_with_the_server(tmp_path: Path) -> None:
    began = tmp_path / "began"
    arguments = [sys.executable, "-c", PARENT, str(APP), f"hang_in_native_code {began}"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pidfd = os.pidfd_open(int(parent.stdout.readline()))
            until(began.exists)
        finally:
            parent.kill()
    try:
        assert select.select([pidfd], [], [], PATIENCE)[0]
    finally:
        os.close(pidfd)
