"""A configured model over both transports, with tritonclient: ModelConfig, and the behaviour that it
promises.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.models import small
from support.processes.server import SERVER_PROCESSES, running
from support.server.rig import PATIENCE, Array, fp32
from support.wire.inputs import tensor
from tritonclient.utils import InferenceServerException

from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.app import App
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.onnx.loading import loading as onnx_loading
from tensorferry.server.runtime.session import Session

XY = (
    'input { name: "x" data_type: TYPE_FP32 dims: [ 1, 3 ] reshape { shape: 3 } } '
    'output { name: "y" data_type: TYPE_FP32 dims: 3 } '
)

Client: TypeAlias = triton.InferenceServerClient
Dial = Callable[..., Client]


@pytest.fixture
def dial(tmp_path: Path, transport: str) -> Iterator[Dial]:
    """A client of a server with the model `m`, y = 2 x, with this configuration.

    The server is in this process, so that tests can hold its runs; one of several processes has its own.
    """
    with ExitStack() as stack:

        def connect(text: str | None, repository: bool = True) -> Client:
            home = tmp_path / "models" / "m"
            (home / "1").mkdir(parents=True)
            path = small.twice(home / "1" / "model.onnx")
            if SERVER_PROCESSES:
                if text is not None:
                    (home / "config.pbtxt").write_text(text)
                model = ("--model-repository", home.parent) if repository else (f"m={path}",)
                server = stack.enter_context(running(*model, "--device", "cpu", transport=transport))
                return stack.enter_context(Client(server.address))
            config = parse_config(text, "config.pbtxt") if text is not None else None
            source = ModelSource("m", path, "1", config, home if repository else None)
            app = App(ServerConfig((source,), port=0, device="cpu", transport=transport))
            stack.callback(app.stop)
            app.start()
            app.load()
            return stack.enter_context(Client(app.address))

        yield connect


def x(array: Array) -> list[triton.InferInput]:
    return [tensor("x", array, "FP32")]


def config_of(client: Client, **options: Any) -> ModelConfig:
    """Return the client's configuration as our message."""
    return ModelConfig.FromString(client.get_model_config("m", **options).config.SerializeToString())


def test_clients_get_the_completed_configuration(dial: Dial) -> None:
    client = dial("max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 100 } " + XY)
    expected = parse_config(
        """
        name: "m" platform: "onnxruntime_onnx" backend: "onnxruntime" default_model_filename: "model.onnx"
        version_policy { latest { num_versions: 1 } } max_batch_size: 8
        dynamic_batching { max_queue_delay_microseconds: 100 preferred_batch_size: 8 }
        instance_group { name: "m" kind: KIND_CPU count: 1 }
        """
        + XY,
        "test",
    )
    assert config_of(client) == config_of(client, model_version="1") == expected
    as_json = client.get_model_config("m", as_json=True)["config"]
    assert (as_json["max_batch_size"], as_json["input"][0]["dims"]) == (8, ["1", "3"])
    assert "model_configuration" in client.get_server_metadata().extensions


def test_shapes_are_those_of_the_configuration(dial: Dial) -> None:
    client = dial("max_batch_size: 4 " + XY)
    metadata = client.get_model_metadata("m")
    assert [list(tensor.shape) for tensor in (*metadata.inputs, *metadata.outputs)] == [[-1, 1, 3], [-1, 3]]
    answer = client.infer("m", x(fp32(4, 1, 3)), client_timeout=PATIENCE).as_numpy("y")
    assert answer.tolist() == (2 * fp32(4, 3)).tolist()
    with pytest.raises(InferenceServerException, match=r"Expected \[-1, 1, 3\], got \[4, 3\]"):
        client.infer("m", x(fp32(4, 3)), client_timeout=PATIENCE)


def test_more_rows_than_max_batch_size_are_split_if_requests_share_batches(dial: Dial) -> None:
    client = dial("max_batch_size: 4 dynamic_batching { } " + XY)
    answer = client.infer("m", x(fp32(9, 1, 3)), client_timeout=PATIENCE).as_numpy("y")
    assert answer.tolist() == (2 * fp32(9, 3)).tolist()


class Gate:
    """Holds the runs of sessions, once it is closed, until it is opened.

    `running` gets the first number of each run from then on. `taken` gets each request that was
    given to the batcher, accepted or not.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.taken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        self.open = threading.Event()
        self.open.set()
        run = Session.run

        def gated(session: Session, inputs: Mapping[str, Array]) -> dict[str, Array]:
            if self._closed:
                self.running.put(float(inputs["x"].flat[0]))
                assert self.open.wait(PATIENCE)
            return run(session, inputs)

        monkeypatch.setattr(RequestQueue, "put", self._reporting(RequestQueue.put))
        monkeypatch.setattr(Session, "run", gated)
        # Only a worker may be held, never the thread that serves the lane.
        monkeypatch.setattr(onnx_loading, "has_steady_run_time", lambda path: False)

    def _reporting(self, put: Callable[..., Any]) -> Callable[..., Any]:
        def reporting_put(*arguments: Any, **options: Any) -> Any:
            try:
                return put(*arguments, **options)
            finally:
                self.taken.put(None)

        return reporting_put

    def close(self) -> None:
        self.open.clear()
        self._closed = True


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


class Sender:
    """Sends requests of one row, by number, one after another, and records their outcomes."""

    def __init__(self, client: Client, gate: Gate) -> None:
        self._client = client
        self._taken = gate.taken
        self._outcomes: dict[float, queue.SimpleQueue[tuple[Any, Any]]] = {}

    def send(self, tag: float, **options: Any) -> None:
        outcomes = self._outcomes[tag] = queue.SimpleQueue()
        inputs = x(np.full((1, 1, 3), tag, np.float32))
        self._client.async_infer("m", inputs, lambda result, error: outcomes.put((result, error)), **options)
        # Calls that are sent at once may arrive in any order.
        self._taken.get(timeout=PATIENCE)

    def error(self, tag: float) -> InferenceServerException:
        _, error = self._outcomes[tag].get(timeout=PATIENCE)
        assert isinstance(error, InferenceServerException)
        return error

    def answered(self, tag: float) -> bool:
        result, error = self._outcomes[tag].get(timeout=PATIENCE)
        assert error is None
        return bool(result.as_numpy("y").tolist() == [[2 * tag] * 3])


POLICY = "max_batch_size: 1 dynamic_batching { %s } " + XY


def held(dial: Dial, gate: Gate, batching: str, **options: Any) -> Sender:
    """A sender whose request 0, with these options, runs until the gate is open."""
    sender = Sender(dial(POLICY % batching), gate)
    gate.close()
    sender.send(0.0, **options)
    assert gate.running.get(timeout=PATIENCE) == 0.0
    return sender


def test_a_queue_timeout_is_reported_while_the_model_runs(dial: Dial, gate: Gate) -> None:
    # The running request has a policy of its own, because it may wait longer for a busy machine.
    levels = "priority_levels: 2 default_priority_level: 2 priority_queue_policy { key: 1 value { } }"
    policy = "default_queue_policy { default_timeout_microseconds: 20000 }"
    sender = held(dial, gate, f"{levels} {policy}", priority=1)
    sender.send(1.0)
    error = sender.error(1.0)
    assert "Request timeout expired" in str(error)
    assert error.status() == "StatusCode.DEADLINE_EXCEEDED"
    gate.open.set()
    assert sender.answered(0.0)


def test_a_request_may_set_a_shorter_timeout_if_the_policy_allows_it(dial: Dial, gate: Gate) -> None:
    policy = "default_timeout_microseconds: 60000000 allow_timeout_override: true"
    sender = held(dial, gate, f"default_queue_policy {{ {policy} }}")
    sender.send(1.0, timeout=20_000)
    assert "Request timeout expired" in str(sender.error(1.0))
    gate.open.set()
    assert sender.answered(0.0)


def test_a_requests_timeout_is_ignored_if_the_policy_does_not_allow_it(dial: Dial, gate: Gate) -> None:
    sender = held(dial, gate, "default_queue_policy { max_queue_size: 9 }")
    sender.send(1.0, timeout=1)
    for tag in range(2, 11):
        sender.send(float(tag))
    assert "Exceeds maximum queue size: 9 requests of priority 1 wait" in str(sender.error(10.0))
    gate.open.set()
    assert all(sender.answered(float(tag)) for tag in range(10))


def test_without_a_policy_the_timeout_is_a_deadline(dial: Dial, gate: Gate) -> None:
    sender = held(dial, gate, "")
    sender.send(1.0, timeout=20_000)
    error = sender.error(1.0)
    assert error.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert "queue policy" not in str(error)


def test_priorities_are_strict(dial: Dial, gate: Gate) -> None:
    batching = "priority_levels: 2 default_priority_level: 2 priority_queue_policy { key: 2 value { max_queue_size: 3 } }"
    sender = held(dial, gate, batching)
    for tag, priority in ((3.0, 2), (4.0, 0), (1.0, 1), (5.0, 7), (2.0, 1)):
        sender.send(tag, priority=priority)
    sender.send(6.0, priority=2)
    assert "3 requests of priority 2 wait, and the model's queue policy allows 3" in str(sender.error(6.0))
    gate.open.set()
    order = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [gate.running.get(timeout=PATIENCE) for _ in order] == order
    assert all(sender.answered(tag) for tag in (0.0, *order))
