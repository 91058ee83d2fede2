"""What surrounds the server process: environment variables, which it sets for its libraries, and standard streams."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from support.processes.free_ports import free_ports
from support.processes.server import ServerProcess, command, environment

from tensorferry.client import InferenceClient
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


@pytest.mark.parametrize("redirection", [">/dev/full", "| true", "<&- >&- 2>&-"])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_server_serves_without_a_usable_standard_output(
    digits_model: Path, tmp_path: Path, redirection: str, processes: str
) -> None:
    """The disk is full, the reader of the output has ended, or the streams were closed."""
    status = tmp_path / "status"
    (port,) = free_ports(1)
    serve = command("serve", digits_model, "--port", str(port), "--processes", processes)
    line = f'trap "" TERM; {{ {shlex.join(serve)}; echo $? >{shlex.quote(str(status))}; }} {redirection}'
    with subprocess.Popen(["bash", "-c", line], env=environment(), process_group=0) as shell:
        with InferenceClient(f"127.0.0.1:{port}") as client:
            ready = client.wait_ready(60)
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(60)
    assert ready
    assert status.read_text() == "0\n"


def test_threads_that_read_messages_interrupt_no_other_thread(plain: ServerProcess) -> None:
    policies: dict[str, set[int]] = {}
    for pid in plain.processes():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            number = int(thread.name)
            name = "main" if number == pid else (thread / "comm").read_text().strip()
            policies.setdefault(name, set()).add(os.sched_getscheduler(number))
    (own,) = policies["main"]
    # Core may have started another one since, on a thread of ours.
    assert (os.SCHED_BATCH if own == os.SCHED_OTHER else own) in policies["event_engine"]
