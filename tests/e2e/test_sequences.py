"""Sequences on a real server: clients send inputs, the server keeps the states, and sequences share batches."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import urllib.request
from collections.abc import Iterator, Mapping
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
from support.processes.server import ServerProcess

from tensorferry.client import InferenceClient, InferenceError, InvalidInput
from tensorferry.client.aio import InferenceClient as AsyncClient
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

# The state has its rows on axis 1, as those of recurrent layers.
TEXT = """(float[batch, 2] x, float[3, batch, 2] past) => (float[batch, 2] y, float[3, batch, 2] next)
{ next = Add (past, x) sum = ReduceSum <keepdims = 0> (next, zero) y = Mul (sum, two) }"""


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
    with urllib.request.urlopen(server.ready["metrics"].replace("/metrics", "/status.json")) as page:
        (model,) = json.load(page)["models"]
    found: Mapping[str, Any] = model["sequences"]
    return found


def test_clients_see_a_model_without_its_states(client: InferenceClient, server: ServerProcess) -> None:
    metadata = client.metadata("totals")
    assert [tensor.name for tensor in metadata.inputs] == ["x"]
    assert [tensor.name for tensor in metadata.outputs] == ["y"]
    assert metadata.properties["states"] == "past=next"
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
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
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)

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
        assert sequences(server)["living"] == 1
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


def test_many_sequences_share_batches_and_none_gets_the_state_of_another(
    client: InferenceClient, server: ServerProcess
) -> None:
    """Streams that end in the middle and bad requests; SEQUENCES=10000 runs as many."""
    count = int(os.environ.get("SEQUENCES", "128"))
    (before,), barrier = client.statistics("totals"), threading.Barrier(16)

    def run(worker: int) -> None:
        generator = np.random.default_rng(worker)
        barrier.wait(PATIENCE)
        for _ in range(count // 16):
            total = 0
            with client.sequence("totals") as sequence:
                for _ in range(int(generator.integers(1, 6))):
                    x = int(generator.integers(1000))
                    total += x
                    assert sequence.infer(row(x))["y"][0, 0] == 6 * total
                if generator.random() < 0.3:
                    with pytest.raises(InferenceError):
                        sequence.infer({"x": np.ones((3, 2), np.float32)})

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(run, worker) for worker in range(16)]:
            done.result(PATIENCE + count / 10)
    until(lambda: sequences(server)["living"] == 0)
    assert sequences(server)["state_bytes"] == 0
    (after,) = client.statistics("totals")
    assert after.rows - before.rows > after.executions - before.executions


def test_the_metrics_count_sequences(client: InferenceClient, server: ServerProcess) -> None:
    with client.sequence("totals") as sequence:
        sequence.infer(row(1))
        with urllib.request.urlopen(server.ready["metrics"]) as page:
            text = page.read().decode()

    def total(name: str) -> float:
        """Of all processes of the server."""
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}{{")
        )

    assert total("tensorferry_sequences") == 1
    assert total("tensorferry_state_bytes") == 24
    assert total("tensorferry_sequences_started_total") > total("tensorferry_sequences_ended_total") > 0


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
