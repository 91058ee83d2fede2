"""The server sets core up so that the thread that polls reads the sockets; a user's own settings stand.

Seen by what core's pool of threads does while requests come one by one: it wakes for each, or not.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import grpc
import numpy as np
import pytest
from e2e.server import command, environment

from tensorferry.client import InferenceClient
from tensorferry.server import environment as product

LISTENER = "event_engine_listener"
REQUESTS = 500


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, f"-{LISTENER}"),
        ("", f"-{LISTENER}"),
        ("another,-third", f"another,-third,-{LISTENER}"),
        (LISTENER, LISTENER),
        (f"-{LISTENER}", f"-{LISTENER}"),
        (f"another,{LISTENER}", f"another,{LISTENER}"),
    ],
)
def test_what_the_user_says_stands(given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    monkeypatch.setenv("GRPC_VERBOSITY", "")
    if given is not None:
        monkeypatch.setenv("GRPC_EXPERIMENTS", given)
    for _ in range(2):
        product.prepare()
        assert os.environ["GRPC_EXPERIMENTS"] == expected


@pytest.mark.parametrize(("given", "expected"), [(None, "NONE"), ("DEBUG", "DEBUG"), ("", "")])
def test_core_logs_only_if_the_user_says_so(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What `prepare` changes besides is put back too.
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")
    monkeypatch.setenv("GRPC_VERBOSITY", "")
    if given is None:
        monkeypatch.delenv("GRPC_VERBOSITY")
    else:
        monkeypatch.setenv("GRPC_VERBOSITY", given)
    product.prepare()
    assert os.environ["GRPC_VERBOSITY"] == expected


def _wakes(pid: int) -> int:
    """How often the threads of core's pool have waited for something."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"].startswith(("event_engine", "default-exec")):
            total += int(status["voluntary_ctxt_switches"])
    return total


@pytest.mark.parametrize(("given", "read_by_pool"), [(None, False), (LISTENER, True)])
def test_who_reads_the_sockets(given: str | None, read_by_pool: bool, digits_model: Path) -> None:
    variables = {name: value for name, value in environment().items() if name != "GRPC_EXPERIMENTS"}
    if given is not None:
        variables["GRPC_EXPERIMENTS"] = given
    arguments = ("serve", digits_model, "--port", "0", "--log-format", "json", "--transport", "lane")
    with subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = json.loads(process.stdout.readline())["address"]
        with InferenceClient(address) as client:
            image = np.zeros((1, 8, 8), np.uint8)
            client.infer("digits", {"image": image})
            before = _wakes(process.pid)
            for _ in range(REQUESTS):
                client.infer("digits", {"image": image})
            wakes = _wakes(process.pid) - before
        process.terminate()
        log = process.stderr.read()
        assert process.wait(60) == 0
    assert "experiment" not in log
    # The pool of 1.71 never reads them.
    if read_by_pool and not grpc.__version__.startswith("1.71."):
        assert wakes >= REQUESTS / 2
    else:
        assert wakes < REQUESTS / 2


def test_onnx_runtime_tells_nobody_what_it_runs(digits_model: Path, tmp_path: Path) -> None:
    """It would keep here what it is yet to send; anywhere but in CI."""
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
    assert list(tmp_path.rglob("*")) == []
