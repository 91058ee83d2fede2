"""Model repositories, controlled by tritonclient: reloads under load, overrides, broken versions,
polling.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e.fixtures import Serve
from polling import until
from support.models import small
from support.processes.server import ServerProcess, command, environment, running
from support.wire.inputs import tensor
from tritonclient.utils import InferenceServerException

# `make soak` reloads models under load for minutes.
RELOADS, CLIENTS = 6, 4


def scaled(factor: float) -> bytes:
    """Return a model: y [batch, 3] = factor × x."""
    text = "(float[batch, 3] x) => (float[batch, 3] y) { y = Mul (x, factor) }"
    with tempfile.TemporaryDirectory() as folder:
        return small.written(Path(folder) / "scaled.onnx", text, factor=np.float32(factor)).read_bytes()


def write(root: Path, name: str, version: int, content: bytes, config: str | None = None) -> None:
    """Replace the old file by the new one at once, as an operator should."""
    path = root / name / str(version) / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.rename(path)


def ask(
    client: triton.InferenceServerClient, model: str = "m", version: str = "", rows: int = 1
) -> list[float]:
    """Return the factors of the rows in the answer."""
    x = np.arange(1, 3 * rows + 1, dtype=np.float32).reshape(rows, 3)
    y = client.infer(model, [tensor("x", x, "FP32")], model_version=version, client_timeout=30).as_numpy("y")
    assert y.shape == x.shape
    return sorted(set((y / x).ravel().tolist()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@dataclass(frozen=True)
class Explicit:
    """A server whose clients load models, and its repository; each test has its own models."""

    root: Path
    server: ServerProcess


@pytest.fixture(scope="module")
def explicit(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explicit]:
    root = tmp_path_factory.mktemp("explicit")
    write(root, "other", 1, scaled(5))
    options = ("--model-control", "explicit", "--load-model", "other")
    with running("--model-repository", root, *options, transport=transport, logs_errors=True) as server:
        yield Explicit(root, server)


@pytest.fixture
def connect() -> Iterator[Callable[[ServerProcess], triton.InferenceServerClient]]:
    clients: list[triton.InferenceServerClient] = []

    def connect(server: ServerProcess) -> triton.InferenceServerClient:
        clients.append(triton.InferenceServerClient(server.address))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


Connect = Callable[[ServerProcess], triton.InferenceServerClient]


def index(client: triton.InferenceServerClient) -> list[tuple[str, str, str]]:
    return [(m.name, m.version, m.state) for m in client.get_model_repository_index().models]


def refused(action: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        action()
    return str(caught.value.status()), str(caught.value.message())


def test_a_repository_is_served_unchanged(root: Path, serve: Serve, connect: Connect) -> None:
    write(root, "m", 1, scaled(1))
    write(root, "m", 3, scaled(3))
    write(root, "all", 1, scaled(10), "version_policy { all { } }")
    write(root, "all", 2, scaled(20))
    client = connect(serve("--model-repository", root))
    assert client.is_server_ready()
    assert index(client) == [("all", "1", "READY"), ("all", "2", "READY"), ("m", "3", "READY")]
    assert ask(client, "m") == [3.0]
    assert [ask(client, "all"), ask(client, "all", "1"), ask(client, "all", "2")] == [[20.0], [10.0], [20.0]]
    assert client.get_model_metadata("all").versions == ["1", "2"]
    status, message = refused(lambda: ask(client, "m", "1"))
    assert status == "StatusCode.NOT_FOUND"
    assert "unknown model: 'm' version 1 is not found" in message


def test_load_and_unload(explicit: Explicit, connect: Connect) -> None:
    write(explicit.root, "m", 1, scaled(2))
    client = connect(explicit.server)
    assert client.is_server_ready()
    assert {("m", "", ""), ("other", "1", "READY")} <= {*index(client)}
    assert not client.is_model_ready("m")
    status, message = refused(lambda: ask(client))
    assert status == "StatusCode.NOT_FOUND"
    assert "Request for unknown model: 'm' is not found" in message
    client.load_model("m")
    assert client.is_model_ready("m")
    assert ask(client) == [2.0]
    client.unload_model("m")
    assert not client.is_model_ready("m")
    status, message = refused(lambda: ask(client))
    assert status == "StatusCode.UNAVAILABLE"
    assert "is not at ready state" in message
    assert ask(client, "other") == [5.0]
    client.load_model("m")
    assert ask(client) == [2.0]
    assert refused(lambda: client.load_model("../m"))[0] == "StatusCode.INVALID_ARGUMENT"


def test_a_config_and_files_that_a_client_sends(explicit: Explicit, connect: Connect) -> None:
    write(explicit.root, "pair", 1, scaled(1))
    write(explicit.root, "pair", 2, scaled(2))
    client = connect(explicit.server)
    client.load_model("pair")
    assert ask(client, "pair") == [2.0]
    client.load_model("pair", config=json.dumps({"versionPolicy": {"specific": {"versions": [1]}}}))
    assert ask(client, "pair") == [1.0]
    assert not client.is_model_ready("pair", "2")
    client.load_model("pair", config="{}", files={"file:7/model.onnx": scaled(7)})
    assert ask(client, "pair") == [7.0]
    assert client.get_model_metadata("pair").versions == ["7"]
    client.load_model("sent", config="{}", files={"file:1/model.onnx": scaled(9)})
    assert ask(client, "sent") == [9.0]
    client.load_model("pair")
    assert ask(client, "pair") == [2.0], "what is in the repository"
    for config, files, expected in (
        ("{", None, "not a ModelConfig in JSON"),
        (json.dumps({"name": "other"}), None, "has the name 'other'"),
        ("{}", {"file:../../m.onnx": b""}, "must be 'file:VERSION/NAME'"),
        ("{}", {"file:1/../../m.onnx": b""}, "must be 'file:VERSION/NAME'"),
        (None, {"file:1/model.onnx": b""}, "needs a configuration"),
    ):
        status, message = refused(lambda: client.load_model("pair", config=config, files=files))  # noqa: B023
        assert status == "StatusCode.INVALID_ARGUMENT"
        assert expected in message
    assert ask(client, "pair") == [2.0]


def test_a_broken_new_version_leaves_the_old_one_serving(explicit: Explicit, connect: Connect) -> None:
    write(explicit.root, "late", 1, scaled(1))
    client = connect(explicit.server)
    client.load_model("late")
    write(explicit.root, "late", 2, b"this is no model")
    status, message = refused(lambda: client.load_model("late"))
    assert status == "StatusCode.FAILED_PRECONDITION"
    assert "load failed for model 'late': version 2 is at UNAVAILABLE state" in message
    assert ask(client, "late") == [1.0]
    assert client.is_server_ready()
    entries = [m for m in client.get_model_repository_index().models if m.name == "late"]
    assert [(m.version, m.state, bool(m.reason)) for m in entries] == [
        ("1", "READY", False),
        ("2", "UNAVAILABLE", True),
    ]
    until(lambda: any("cannot be loaded" in line for line in explicit.server.log))


def test_a_configuration_that_cannot_be_read_is_in_the_index(
    root: Path, transport: str, connect: Connect
) -> None:
    write(root, "good", 1, scaled(1))
    write(root, "bad", 1, scaled(1), config="batch: 1")
    (root / "odd" / "1").mkdir(parents=True)
    # A lone surrogate has no UTF-8.
    (root / "odd" / "1" / "model.py").write_text("raise RuntimeError(chr(0xDCFF))")
    with running(
        *("--model-repository", root, "--model-control", "explicit", "--load-model", "*"),
        *("--exit-on-error", "false"),
        transport=transport,
        logs_errors=True,
    ) as server:
        client = connect(server)
        odd = ("odd", "1", "UNAVAILABLE")
        assert index(client) == [("bad", "", "UNAVAILABLE"), ("good", "1", "READY"), odd]
        bad = client.get_model_repository_index().models[0]
        assert 'Message type "inference.ModelConfig" has no field named "batch"' in bad.reason
        (root / "bad" / "config.pbtxt").unlink()
        client.load_model("bad")
        assert index(client) == [("bad", "1", "READY"), ("good", "1", "READY"), odd]


def test_reloads_under_load_lose_nothing(explicit: Explicit, connect: Connect) -> None:
    write(explicit.root, "busy", 1, scaled(1))
    control = connect(explicit.server)
    control.load_model("busy")
    # Allowed factors: that of the serving version, and that of the one being loaded.
    allowed = {1.0}
    wrong: list[object] = []
    counts = [0] * CLIENTS
    stop = threading.Event()
    # Guards counts and wrong.
    progress = threading.Condition()

    def call(number: int, client: triton.InferenceServerClient) -> None:
        while not stop.is_set():
            found: object
            try:
                (found,) = ask(client, "busy", rows=1 + number)
            except Exception as error:
                found = error
            with progress:
                if found not in allowed:
                    wrong.append(found)
                counts[number] += 1
                progress.notify_all()

    threads = [threading.Thread(target=call, args=(n, connect(explicit.server))) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for reload in range(2, RELOADS + 2):
        allowed.add(float(reload))
        # Alternately a new version, and another file of the same version.
        write(explicit.root, "busy", 1 + reload // 2, scaled(reload))
        control.load_model("busy")
        assert ask(control, "busy") == [float(reload)], "from the moment that the load has returned"
        with progress:
            # Both versions have answered meanwhile.
            assert progress.wait_for(lambda: wrong or min(counts) >= reload, 60), counts  # noqa: B023
        if wrong:
            break
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert control.is_model_ready("busy")


def test_polling(root: Path, tmp_path: Path, serve: Serve, connect: Connect) -> None:
    write(root, "m", 1, scaled(1))
    write(root, "gone", 1, scaled(1))
    server = serve("--model-repository", root, "--model-control", "poll", "--repository-poll-seconds", "0.02")
    client = connect(server)
    # The server may poll at any time, so every change is atomic; else it would rightly log an
    # error.
    aside = tmp_path / "aside"
    write(aside, "m", 2, scaled(2))
    write(aside, "new", 1, scaled(5))
    (aside / "m" / "2").rename(root / "m" / "2")
    (aside / "new").rename(root / "new")
    (root / "gone").rename(aside / "gone")
    expected = {
        ("m", "2"): "READY",
        ("new", "1"): "READY",
        ("gone", "1"): "UNAVAILABLE",
        ("m", "1"): "UNAVAILABLE",
    }
    until(
        lambda: {(name, version): state for name, version, state in index(client)},
        lambda states: expected.items() <= states.items(),
    )
    assert [ask(client), ask(client, "new")] == [[2.0], [5.0]]


def test_a_repository_that_cannot_be_served_ends_the_start(root: Path, transport: str) -> None:
    write(root, "m", 1, b"this is no model")
    ended = subprocess.run(
        command("serve", "--model-repository", root, "--port", "0"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "tensorferry serve: load failed for model 'm': version 1 is at UNAVAILABLE state" in ended.stderr
    write(root, "good", 1, scaled(1))
    server = ServerProcess.start("--model-repository", root, "--exit-on-error", "false", transport=transport)
    with triton.InferenceServerClient(server.address) as client:
        assert ask(client, "good") == [1.0]
        assert not client.is_model_ready("m")
    assert (server.ready["failed"], [model["name"] for model in server.ready["models"]]) == (["m"], ["good"])
    assert server.stop() == 0
