"""Environment variables that the server process sets for its libraries; the user's own values are
kept.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.processes.server import ServerProcess, command, environment

from tensorferry.server.transport import grpc_environment as product


@pytest.mark.parametrize(("given", "expected"), [(None, "NONE"), ("DEBUG", "DEBUG"), ("", "")])
def test_core_logs_only_if_the_user_says_so(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "")
    if given is None:
        monkeypatch.delenv("GRPC_VERBOSITY")
    else:
        monkeypatch.setenv("GRPC_VERBOSITY", given)
    product.prepare()
    assert os.environ["GRPC_VERBOSITY"] == expected


def test_onnx_runtime_stores_no_telemetry(digits_model: Path, tmp_path: Path) -> None:
    """Its telemetry would store unsent events on disk, except in CI."""
    kept = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME", "CI")
    variables = {name: value for name, value in environment().items() if name not in kept}
    arguments = ("serve", digits_model, "--port", "0", "--log-format", "json")
    with subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**variables, "HOME": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 0
    stored = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    # What the server's own checks of the model found.
    assert all(path.parts[:2] == (".cache", "tensorferry") for path in stored)


def test_threads_that_read_messages_interrupt_no_other_thread(plain: ServerProcess) -> None:
    policies: dict[str, set[int]] = {}
    for pid in plain.processes():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            number = int(thread.name)
            name = "main" if number == pid else (thread / "comm").read_text().strip()
            policies.setdefault(name, set()).add(os.sched_getscheduler(number))
    (own,) = policies["main"]
    assert policies["event_engine"] == {os.SCHED_BATCH if own == os.SCHED_OTHER else own}
