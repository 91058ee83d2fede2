"""The trial of a suspect: one at a time of all processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tensorferry.server.processes.trial import Trial, remove_ended


def test_one_process_tries_at_a_time(tmp_path: Path) -> None:
    first, second = (Trial(tmp_path, lambda: True) for _ in range(2))
    assert first.begin()
    assert not first.begin()
    assert not second.begin()
    first.end()
    assert second.begin()
    assert not first.begin()
    second.end()
    assert first.begin()


def test_nothing_is_tried_unless_all_processes_serve(tmp_path: Path) -> None:
    serve = False
    trial = Trial(tmp_path, lambda: serve)
    assert not trial.begin()
    serve = True
    assert trial.begin()


def test_after_a_death_trials_begin_once_the_supervisor_permits_it(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tensorferry.server.processes.trial import Trial\n"
        "assert Trial(Path(sys.argv[1]), lambda: True).begin()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == -9
    trial = Trial(tmp_path, lambda: True)
    assert not trial.begin()
    remove_ended(tmp_path)
    assert trial.begin()
