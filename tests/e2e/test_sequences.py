"""Sequences on a real server: clients send inputs, the server keeps the states, and sequences share batches."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime
import pytest
from e2e.fixtures import Serve
from polling import PATIENCE, until
from support.models import small
from support.processes.observed import of_module
from support.processes.probe import stub_of
from support.processes.server import ServerProcess, running

from tensorferry.client import (
    FailedPrecondition,
    InferenceClient,
    InferenceError,
    InvalidInput,
    Unavailable,
)
from tensorferry.client.aio import InferenceClient as AsyncClient
from tensorferry.protos import inference_pb2 as pb

# The state has its rows on axis 1, as those of recurrent layers.
TEXT = """(float[batch, 2] x, float[3, batch, 2] past) => (float[batch, 2] y, float[3, batch, 2] next)
{ next = Add (past, x) sum = ReduceSum <keepdims = 0> (next, zero) y = Mul (sum, two) }"""


_THREADS = 16


@pytest.fixture(scope="module")
def server(share: Serve, model_dir: Path) -> ServerProcess:
    path = model_dir / "totals.onnx"
    if not path.exists():
        small.written(path, TEXT, zero=np.array([0]), two=np.float32(2))
    return share(path, "--state", "past=next", "--metrics-port", 0)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[InferenceClient]:
    with InferenceClient(server.address) as client:
        yield client


def row(x: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.full((1, 2), x, np.float32)}


def request(x: float, number: int | str, **flags: bool) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="totals", raw_input_contents=[row(x)["x"].tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    kind = "string_param" if isinstance(number, str) else "int64_param"
    setattr(message.parameters["sequence_id"], kind, number)
    for name, value in flags.items():
        message.parameters[f"sequence_{name}"].bool_param = value
    return message


def y_of(response: pb.ModelInferResponse) -> float:
    return float(np.frombuffer(response.raw_output_contents[0], np.float32)[0])


def sequences(server: ServerProcess) -> Mapping[str, Any]:
    found: Mapping[str, Any] = server.statuses()["totals"]["sequences"]
    return found


def test_clients_see_a_model_without_its_states(client: InferenceClient, server: ServerProcess) -> None:
    metadata = client.metadata("totals")
    assert [tensor.name for tensor in metadata.inputs] == ["x"]
    assert [tensor.name for tensor in metadata.outputs] == ["y"]
    assert metadata.properties["states"] == "past=next"
    with stub_of(server.address) as stub:
        config = stub.ModelConfig(pb.ModelConfigRequest(name="totals"), timeout=PATIENCE).config
    assert [(each.input_name, each.output_name) for each in config.sequence_batching.state] == [
        ("past", "next")
    ]
    assert [each.name for each in (*config.input, *config.output)] == ["x", "y"]
    # A request without a sequence is one by itself, and may ask for the state.
    with InferenceClient(server.address, check=False) as unchecked:
        for _ in range(2):
            result = unchecked.infer("totals", row(1), outputs=["y", "next"])
            assert result["y"].tolist() == [[6, 6]]
            assert result["next"].tolist() == [[[1, 1]]] * 3


@pytest.mark.parametrize("number", [7, 2**62, "a name"])
def test_unary_calls_of_a_sequence(server: ServerProcess, number: int | str) -> None:
    with stub_of(server.address) as stub:

        def infer(x: float, **flags: bool) -> float:
            return y_of(stub.ModelInfer(request(x, number, **flags), timeout=PATIENCE))

        def refused(x: float, **flags: bool) -> tuple[str, str]:
            with pytest.raises(grpc.RpcError) as error:
                infer(x, **flags)
            return error.value.code().name, str(error.value.details())

        assert [infer(1, start=True), infer(2), infer(3, end=True)] == [6, 18, 36]
        code, text = refused(1)
        assert (code, "has ended with its last request" in text) == ("FAILED_PRECONDITION", True)
        assert [infer(4, start=True), infer(0), infer(1, start=True, end=True)] == [24, 24, 6]
        message = request(1, "unknown")
        with pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(message, timeout=PATIENCE)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "must specify the START flag on the first request of the sequence" in str(
            error.value.details()
        )


def test_the_clients_sequence_is_freed_with_its_block(client: InferenceClient, server: ServerProcess) -> None:
    with client.sequence("totals") as sequence:
        assert [sequence.infer(row(x))["y"][0, 0] for x in (1, 2, 3)] == [6, 18, 36]
        # The last one of a test before may end after its answer.
        until(lambda: sequences(server)["living"], (1).__eq__)
    until(lambda: sequences(server)["living"] == 0)
    assert sequences(server)["state_bytes"] == 0
    with client.sequence("totals") as sequence:
        sequence.infer(row(1), end=True)
        with pytest.raises(InvalidInput, match="one that is over"):
            sequence.infer(row(1))
    with client.sequence("totals") as sequence:
        with pytest.raises(InferenceError, match="batch-size 1"):
            sequence.infer({"x": np.ones((2, 2), np.float32)})
        with pytest.raises(InvalidInput):
            sequence.infer(row(1))


def test_the_same_with_asyncio(server: ServerProcess) -> None:
    async def run(client: AsyncClient, x: int) -> list[float]:
        async with client.sequence("totals") as sequence:
            return [(await sequence.infer(row(x)))["y"][0, 0] for _ in range(3)]

    async def main() -> list[list[float]]:
        async with AsyncClient(server.address) as client:
            return await asyncio.gather(*(run(client, x) for x in range(20)))

    assert asyncio.run(main()) == [[6 * x, 12 * x, 18 * x] for x in range(20)]


class Clients:
    """Threads that run sequences, some of which end in the middle or with a bad request.

    Each answer must be that of its own sequence. A sequence may be lost only if `loses`; it then says so.
    """

    def __init__(
        self, address: str, count: int, factors: Sequence[int] = (6,), *, loses: bool = False
    ) -> None:
        self._address, self._count, self._factors, self._loses = address, count, factors, loses
        # Guards the counts.
        self._lock = threading.Lock()
        self.done = self.lost = self.unexplained = 0

    def run(self, worker: int) -> None:
        generator = np.random.default_rng(worker)
        with InferenceClient(self._address) as client:
            for _ in range(self._count // _THREADS):
                try:
                    self._run_one(client, generator)
                except (Unavailable, FailedPrecondition) as error:
                    if not self._loses:
                        raise
                    said = isinstance(error, Unavailable) or "begin it again" in error.message
                    with self._lock:
                        self.lost += 1
                        self.unexplained += not said
                with self._lock:
                    self.done += 1

    def _run_one(self, client: InferenceClient, generator: np.random.Generator) -> None:
        total, factors = 0, set(self._factors)
        with client.sequence("totals") as sequence:
            for _ in range(int(generator.integers(1, 6))):
                x = int(generator.integers(1, 1000))
                total += x
                y = sequence.infer(row(x))["y"][0, 0]
                factors &= {factor for factor in self._factors if y == factor * total}
                assert factors, f"{y} is no sum of this sequence"
            if generator.random() < 0.3:
                with pytest.raises(InferenceError) as caught:
                    sequence.infer({"x": np.ones((3, 2), np.float32)})
                if isinstance(caught.value, Unavailable):
                    raise caught.value

    def await_done(self, count: int) -> None:
        until(lambda: self.done >= count, seconds=PATIENCE + self._count)

    def run_all(self, disturb: Callable[[Clients], None] = lambda clients: None) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            running = [pool.submit(self.run, worker) for worker in range(_THREADS)]
            disturb(self)
            for done in running:
                done.result(PATIENCE + self._count / 10)


def server_processes(server: ServerProcess) -> list[int]:
    return of_module(server.process.pid, "tensorferry.server.processes")


def count_of_sequences(usual: int) -> int:
    """Return how many sequences to run; SEQUENCES=10000 asks for as many."""
    return int(os.environ.get("SEQUENCES", usual))


def test_many_sequences_share_batches_and_none_gets_the_state_of_another(
    client: InferenceClient, server: ServerProcess
) -> None:
    (before,) = client.statistics("totals")
    Clients(server.address, count_of_sequences(128)).run_all()
    until(lambda: sequences(server)["living"] == 0)
    assert sequences(server)["state_bytes"] == 0
    (after,) = client.statistics("totals")
    assert after.rows - before.rows > after.executions - before.executions


def test_no_sequence_is_lost_or_wrong_while_its_model_is_reloaded(
    controlled: ServerProcess, tmp_path: Path
) -> None:
    """A sequence has the answers of one of both models from its start to its end."""
    count = count_of_sequences(160)

    def reload(clients: Clients) -> None:
        with InferenceClient(controlled.address) as client:
            for at in range(1, 4):
                clients.await_done(at * count // 5)
                written(tmp_path, 100 if at % 2 else 2)
                client.load_model("totals")

    clients = Clients(controlled.address, count, (6, 300))
    clients.run_all(reload)
    assert (clients.done, clients.lost) == (count // _THREADS * _THREADS, 0)
    until(lambda: sequences(controlled)["living"] == 0)
    assert sequences(controlled)["state_bytes"] == 0


def test_sequences_of_a_process_that_is_killed_are_lost_and_say_so(transport: str, tmp_path: Path) -> None:
    count = count_of_sequences(160)
    path = small.written(tmp_path / "totals.onnx", TEXT, zero=np.array([0]), two=np.float32(2))
    options = ("--state", "past=next", "--processes", "2", "--metrics-port", "0")
    with running(path, *options, transport=transport, logs_errors=True) as server:

        def kill(clients: Clients) -> None:
            for at in range(1, 4):
                clients.await_done(at * count // 5)
                victim = min(server_processes(server))
                os.kill(victim, signal.SIGKILL)
                until(lambda: len({*server_processes(server)} - {victim}) == 2)  # noqa: B023

        clients = Clients(server.address, count, loses=True)
        clients.run_all(kill)
        assert clients.done == count // _THREADS * _THREADS
        assert clients.lost < clients.done
        assert not clients.unexplained
        # The page is that of one process, whichever is asked.
        until(lambda: sequences(server)["state_bytes"] == 0)


def written(folder: Path, factor: float) -> None:
    path = folder / "totals" / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    small.written(path, TEXT, zero=np.array([0]), two=np.float32(factor))


@pytest.fixture
def controlled(serve: Serve, tmp_path: Path) -> ServerProcess:
    written(tmp_path, 2)
    return serve(
        *("--model-repository", tmp_path, "--model-control", "explicit", "--load-model", "totals"),
        *("--state", "past=next", "--metrics-port", "0", "--processes", "1"),
    )


def test_a_living_sequence_stays_with_its_model_at_a_reload(
    controlled: ServerProcess, tmp_path: Path
) -> None:
    with InferenceClient(controlled.address) as client:

        def y(sequence: int, x: float, rows: int = 1, **flags: bool) -> float:
            parameters = {f"sequence_{name}": value for name, value in {"id": sequence, **flags}.items()}
            inputs = {"x": np.repeat(row(x)["x"], rows, axis=0)}
            return float(client.infer("totals", inputs, parameters=parameters)["y"][0, 0])

        with client.sequence("totals") as streamed:
            assert [y(1, 1, start=True), y(2, 1, start=True)] == [6, 6]
            assert streamed.infer(row(1))["y"][0, 0] == 6
            written(tmp_path, 100)
            client.load_model("totals")
            # The new model refuses a start, which therefore ends nothing.
            with pytest.raises(InferenceError, match="batch-size 1"):
                y(1, 1, rows=2, start=True)
            assert [y(1, 2), y(3, 1, start=True), y(3, 1)] == [18, 300, 600]
            assert streamed.infer(row(2))["y"][0, 0] == 18
            # Begun again, it is one of the new model.
            assert [y(2, 1, start=True), y(2, 1)] == [300, 600]
            assert y(1, 3, end=True) == 36
            with pytest.raises(FailedPrecondition, match="has ended with its last request"):
                y(1, 1)
        assert y(1, 1, start=True) == 300


def test_a_living_sequence_goes_on_while_its_model_is_unloaded(controlled: ServerProcess) -> None:
    with InferenceClient(controlled.address) as client, InferenceClient(controlled.address) as operator:
        with client.sequence("totals") as sequence:
            assert sequence.infer(row(1))["y"][0, 0] == 6
            operator.unload_model("totals")
            assert sequence.infer(row(2))["y"][0, 0] == 18
            with pytest.raises(InferenceError, match="is UNLOADING"):
                client.infer("totals", row(1))
            assert sequence.infer(row(3), end=True)["y"][0, 0] == 36

        def gone() -> bool:
            (model,) = client.models()
            return model.state == "UNAVAILABLE"

        until(gone)


def test_the_metrics_count_sequences(client: InferenceClient, server: ServerProcess) -> None:
    with client.sequence("totals") as sequence:
        sequence.infer(row(1))
        # Those of the tests before end after their answers.
        text = until(server.page, lambda text: total(text, "tensorferry_sequences") == 1)
    assert total(text, "tensorferry_state_bytes") == 24
    started, ended = (total(text, f"tensorferry_sequences_{event}_total") for event in ("started", "ended"))
    assert started > ended > 0


def total(text: str, name: str) -> float:
    """Return the sum of a metric over all processes of the server."""
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def test_an_encoder_with_states_of_four_batch_axes(serve: Serve, tmp_path: Path) -> None:
    """24 states, as a streaming zipformer has them: of each layer, on axes 0 to 3."""
    dims: list[list[Any]] = [["batch", 2, 3, 2], [2, "batch", 3, 2], [3, 2, "batch", 2], [2, 3, 2, "batch"]]
    layers = list(enumerate(itertools.islice(itertools.cycle(dims), 24)))
    declared = {at: str(each).replace("'", "") for at, each in layers}
    inputs = ", ".join(f"float{each} s{at}" for at, each in declared.items())
    outputs = ", ".join(f"float{each} n{at}" for at, each in declared.items())
    nodes = []
    for at, each in layers:
        axis = each.index("batch")
        order = [1, 2, 3]
        order.insert(axis, 0)
        nodes.append(
            f"t{at} = Transpose <perm = {order}> (wide) h{at} = Mul (s{at}, half) n{at} = Add (h{at}, t{at})"
        )
    body = " ".join(nodes)
    text = f"""(float[batch, 1, 1, 1] x, {inputs}) => (float[batch, 1] y, {outputs})
    {{ wide = Mul (x, x) {body} first = ReduceSum <keepdims = 0> (n0, tail)
       last = ReduceSum <keepdims = 0> (n1, around) sum = Add (first, last) y = Unsqueeze (sum, one) }}"""
    path = small.written(
        tmp_path / "encoder.onnx",
        text,
        half=np.float32(0.5),
        tail=np.array([1, 2, 3]),
        around=np.array([0, 2, 3]),
        one=np.array([1]),
    )
    server = serve(path, "--state", ",".join(f"s{at}=n{at}" for at in range(24)))
    assert "proved" in server.ready["models"][0]["batching"], server.ready

    session = onnxruntime.InferenceSession(path)
    names = [f"n{at}" for at in range(24)]

    def alone(values: list[float]) -> list[float]:
        states = {
            f"s{at}": np.zeros([1 if size == "batch" else size for size in each], np.float32)
            for at, each in layers
        }
        found = []
        for value in values:
            x = np.full((1, 1, 1, 1), value, np.float32)
            y, *after = session.run(["y", *names], {"x": x, **states})
            states = {f"s{at}": after[at] for at in range(24)}
            found.append(float(y[0, 0]))
        return found

    with InferenceClient(server.address) as client, ThreadPoolExecutor(12) as pool:

        def run(seed: int) -> None:
            values = np.random.default_rng(seed).standard_normal(5).tolist()
            with client.sequence("encoder") as sequence:
                got = [
                    float(sequence.infer({"x": np.full((1, 1, 1, 1), value, np.float32)})["y"][0, 0])
                    for value in values
                ]
            np.testing.assert_allclose(got, alone(values), rtol=1e-5)

        for done in [pool.submit(run, seed) for seed in range(24)]:
            done.result(PATIENCE)
