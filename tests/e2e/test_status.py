"""Status of a real server: readiness, members of a batch, and `tensorferry top`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from e2e.fixtures import Serve
from polling import until
from support.processes.faulty import HANG
from support.processes.probe import WAIT_SECONDS, request, stub_of
from support.processes.server import ServerProcess, run_command
from support.server import rig

from tensorferry.client import InferenceClient


def ask(server: ServerProcess, path: str) -> tuple[int, str]:
    code, _, body = rig.ask(server.ready["metrics"], path)
    return code, body.decode()


def status(server: ServerProcess) -> Any:
    code, body = ask(server, "/status.json")
    assert code == 200
    return json.loads(body)


def status_until(server: ServerProcess, reached: Callable[[Any], bool]) -> Any:
    return until(lambda: status(server), reached, seconds=WAIT_SECONDS)


def top(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = ("top", server.ready["metrics"], "--once", "--interval", "0.1", *arguments)
    return run_command(*words, variables={"PYTHONIOENCODING": "utf-8"})


def test_an_answered_request_is_in_its_recorded_batch(serve: Serve, digits_model: Path) -> None:
    server = serve(digits_model, "--metrics-port", 0)
    assert ask(server, "/readyz") == (200, "ready\n")
    assert ask(server, "/healthz") == (200, "alive\n")
    assert ask(server, "/")[1].startswith("<!doctype html>")
    assert status(server)["models"][0]["last_batches"] == []
    with InferenceClient(server.address) as client:
        for number in range(3):
            images = np.zeros((number + 1, 8, 8), np.uint8)
            client.infer("digits", {"image": images}, request_id=f"caller/{number}", timeout=WAIT_SECONDS)
            (model,) = status(server)["models"]
            last = model["last_batches"][-1]
            assert [(member["id"], member["rows"]) for member in last["members"]] == [
                (f"caller/{number}", number + 1)
            ]
            assert (last["number"], model["requests"]["answered"]) == (number + 1, number + 1)
    shown = top(server)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "digits v1 ready" in shown.stdout
    assert "caller/2 x3" in shown.stdout
    assert top(server, "--model", "x").returncode == 1


def test_a_server_that_drains_is_alive_and_not_ready(serve_faulty: Serve, tmp_path: Path) -> None:
    release = tmp_path / "release"
    options = ("--metrics-port", 0, "--max-queue-delay-ms", 600_000)
    server = serve_faulty(*options, FAULTY_RELEASE=str(release))
    with stub_of(server.address) as stub:
        slow = stub.ModelInfer.future(request(1, first=HANG), timeout=600)
        status_until(server, lambda found: found["models"][0]["requests"]["accepted"] == 1)
        server.signal()
        found = status_until(server, lambda found: found["models"][0]["queue"]["running"] == 1)
        assert (found["ready"], found["draining"]) == (False, True)
        code, text = ask(server, "/readyz")
        assert code == 503
        assert text.startswith("not ready\nthe server is draining\n")
        assert ask(server, "/healthz")[0] == 200
        assert "\ntensorferry_running_requests{" in ask(server, "/metrics")[1]
        slow.cancel()
        release.touch()
        assert server.wait() == 0
    ended = top(server)
    assert ended.returncode == 1
    assert "no server answers" in ended.stderr
