"""Unary calls of both clients: values, results, timeouts, metadata, futures."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from client.calls import both_clients, call, either
from client.scripted import Hang, ScriptedServer, ScriptedServicer, echo, echo_typed, failed, model

from tensorferry import client as tf
from tensorferry.client import InferenceClient, aio
from tensorferry.client.connection import context
from tensorferry.client.connection.channel import CallMetadata
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

IMAGES = np.arange(128, dtype=np.uint8).reshape(2, 8, 8)
NOWHERE = "127.0.0.1:1"  # port 1 is never listened on

VALUES: dict[str, Array] = {
    "BOOL": np.array([[True, False]]),
    "INT8": np.array([[-128, 127]], np.int8),
    "INT16": np.array([[-(2**15), 2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "UINT8": np.array([[0, 255]], np.uint8),
    "UINT16": np.array([[0, 2**16 - 1]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1]], np.uint64),
    "FP16": np.array([[1.5, np.inf]], np.float16),
    "FP32": np.array([[1.5, np.nan]], np.float32),
    "FP64": np.array([[1e300, -0.0]], np.float64),
    "BF16": np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
    "BYTES": np.array([[b"", "snö".encode() + b"\0"]], object),
}


def hold(servicer: ScriptedServicer, datatype: str) -> str:
    """Add a model of this datatype, and return its name."""
    name, tensor = f"of {datatype}", {"x": f"{datatype} -1 2"}
    servicer.models[name] = model(name, tensor, tensor)
    return name


def assert_same(received: Array, sent: Array) -> None:
    assert received.dtype == sent.dtype
    np.testing.assert_array_equal(received, sent)


@pytest.mark.parametrize("checked", [True, False])
def test_every_datatype_makes_the_round_trip(server: ScriptedServer, checked: bool) -> None:
    assert VALUES.keys() == tensors.DATATYPES.keys()
    with InferenceClient(server.target, check=checked) as client:
        for datatype, value in VALUES.items():
            name = hold(server.servicer, datatype)
            server.servicer.infer = echo
            for sent in (value, value[:0]):
                assert_same(client.infer(name, {"x": sent})["x"], sent)
            if datatype not in ("FP16", "BF16"):
                server.servicer.infer = echo_typed
                assert_same(client.infer(name, {"x": value})["x"], value)
    assert ("ModelMetadata" in server.servicer.calls) == checked


@pytest.mark.parametrize("checked", [True, False])
def test_strings_of_every_kind_become_bytes(server: ScriptedServer, checked: bool) -> None:
    value: object
    with InferenceClient(server.target, check=checked) as client:
        for value in (["a\0", b"b"], np.array(["a", "b"]), np.array([b"a", b"b"]), ("å", "b")):
            answer = client.infer("text", {"words": value, "weights": np.ones((1, 2), np.float32)})
            expected = [one.encode() if isinstance(one, str) else one for one in np.asarray(value, object)]
            assert answer["words"].tolist() == expected


def test_a_result_has_the_fields_of_the_answer(client: InferenceClient) -> None:
    parameters: dict[str, bool | int | float | str]
    parameters = {"flag": True, "count": -3, "large": 2**64 - 1, "ratio": 0.5, "name": "n"}
    inputs = {"words": ["a"], "weights": [[1, 2]]}
    result = client.infer(
        "text", inputs, version="7", request_id="r1", outputs=["weights"], parameters=parameters
    )
    assert (result.model_name, result.model_version, result.id) == ("text", "7", "r1")
    assert result.parameters == parameters
    assert list(result) == ["weights"]
    assert len(result) == 1
    assert not result["weights"].flags.writeable


# Timeouts, reachability


def test_health_and_metadata_calls(server: ScriptedServer, client: InferenceClient) -> None:
    server.servicer.failures = [grpc.StatusCode.UNAUTHENTICATED]
    with pytest.raises(tf.Unauthenticated):
        client.is_ready()
    assert client.server_metadata() == tf.ServerMetadata("scripted", "9", ("a", "b"))
    assert client.models()[-1] == tf.ModelStatus("broken", "3", "UNAVAILABLE", "no such file")


def test_an_unreachable_server_is_not_live() -> None:
    with InferenceClient(NOWHERE) as client:
        assert not client.is_live()
        assert not client.is_ready(timeout=0.01)
        assert not client.wait_ready(0.05)
        with pytest.raises(tf.Unavailable):
            client.infer("digits", {"image": IMAGES})


def test_wait_ready_waits_for_a_server_that_starts() -> None:
    scripted = ScriptedServer.make()
    with InferenceClient(scripted.target) as client, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(client.wait_ready, 30)
        scripted.server.start()
        assert answer.result()
    scripted.server.stop(None).wait()


@both_clients
async def test_wait_ready_goes_on_while_a_proxy_has_no_server_and_models_are_loaded(
    server: ScriptedServer, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("aio", "threads"):
        monkeypatch.setattr(f"tensorferry.client.{package}.server_calls._PAUSE", 0.0)
    asked = 0

    def loads(request: Any, context: Any) -> None:
        nonlocal asked
        asked += 1
        server.servicer.ready = asked > 2

    server.servicer.failures = [grpc.StatusCode.UNAVAILABLE] * 8
    server.servicer.when_ready = loads
    client = kind(server.target)
    assert await either(client, "wait_ready", 60)
    await either(client, "close")
    assert server.servicer.failures == []
    assert asked == 3


# Metadata


def test_metadata_is_fetched_once_and_read_as_records(
    servicer: ScriptedServicer, client: InferenceClient
) -> None:
    metadata, image = client.metadata("digits"), (tf.TensorMetadata("image", "UINT8", (-1, 8, 8)),)
    versions, properties = ("1", "2"), {"owner": "vision"}
    assert metadata == tf.ModelMetadata("digits", versions, "onnxruntime_onnx", image, image, properties)
    client.infer("digits", {"image": IMAGES})
    assert client.metadata("digits") is metadata
    assert servicer.calls == ["ModelMetadata", "ModelInfer"]
    client.metadata("digits", "2")
    assert servicer.calls.count("ModelMetadata") == 2


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND])
@pytest.mark.parametrize("method", ["infer", "submit", "stream", "shared_memory"])
def test_metadata_is_fetched_again_after_a_refusal(
    servicer: ScriptedServicer, client: InferenceClient, method: str, code: grpc.StatusCode
) -> None:
    def refused() -> None:
        if method == "shared_memory":
            with client.shared_memory("row", 1) as memory:
                servicer.failures = [code]
                memory.infer()
        else:
            client.metadata("row")
            servicer.failures = [] if method == "stream" else [code]
            call(client, method, "row", [{"x": [1]}] if method == "stream" else {"x": [1]})

    servicer.shares_memory = True
    servicer.stream = lambda requests, context: (failed(one.id, "no", code.name) for one in requests)
    for fetched in (1, 2):
        with pytest.raises(tf.InferenceError):
            refused()
        servicer.failures = []
        assert servicer.calls.count("ModelMetadata") == fetched


def test_a_replaced_model_is_noticed(servicer: ScriptedServicer, client: InferenceClient) -> None:
    client.metadata("digits")
    servicer.models["digits"] = model("digits", {"pixels": "FP32 -1 4"}, {"pixels": "FP32 -1 4"})
    pixels = np.ones((2, 4), np.float32)
    assert_same(client.infer("digits", {"pixels": pixels})["pixels"], pixels)


# Futures, threads, closing


async def test_submit_gives_a_future_of_the_result(
    client: InferenceClient, aclient: aio.InferenceClient
) -> None:
    futures = [client.submit("digits", {"image": IMAGES}, request_id=str(number)) for number in range(8)]
    assert {future.result(30).id for future in as_completed(futures, 30)} == {str(n) for n in range(8)}
    assert not futures[0].cancel()
    tasks = [aclient.submit("digits", {"image": IMAGES}, request_id=str(number)) for number in range(8)]
    assert [result.id for result in await asyncio.gather(*tasks)] == [str(number) for number in range(8)]


@both_clients
async def test_cancelling_a_future_or_a_task_cancels_the_call(
    server: ScriptedServer, kind: type[Any]
) -> None:
    hang = Hang()
    server.servicer.infer = hang.infer
    client = kind(server.target)
    future = client.submit("digits", {"image": IMAGES})
    assert await asyncio.to_thread(hang.begun.wait, 30)
    assert future.cancel()
    assert future.cancel()
    with pytest.raises((CancelledError, asyncio.CancelledError)):
        await in_the_loop(future)
    if isinstance(client, InferenceClient):
        assert list(as_completed([future], 30)) == [future]
    assert await asyncio.to_thread(hang.left.wait, 30)
    await either(client, "close")


def in_the_loop(future: Any) -> Any:
    """Return what a test awaits of either client's `submit`."""
    return asyncio.wrap_future(future) if isinstance(future, tf.InferenceFuture) else future


@both_clients
async def test_closing_cancels_calls_in_flight(server: ScriptedServer, kind: type[Any]) -> None:
    hang = Hang()
    server.servicer.infer = hang.infer
    client = kind(server.target)
    future = client.submit("digits", {"image": IMAGES}, request_id="r1")
    assert await asyncio.to_thread(hang.begun.wait, 30)
    await either(client, "close")
    await either(client, "close")
    with pytest.raises(tf.Cancelled, match="r1"):
        await in_the_loop(future)
    with pytest.raises(RuntimeError, match="closed"):
        await either(client, "infer", "digits", {"image": IMAGES})


@pytest.mark.parametrize("method", ["infer", "submit", "stream"])
def test_a_client_that_another_thread_closes_before_a_call_begins(
    client: InferenceClient, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    client.metadata("row")

    def closed_meanwhile(metadata: CallMetadata) -> CallMetadata:
        client.close()
        return metadata

    monkeypatch.setattr(context, "with_context", closed_meanwhile)
    inputs = {"x": [1]}
    with pytest.raises(tf.ClientClosed):
        call(client, method, "row", [inputs] if method == "stream" else inputs)
