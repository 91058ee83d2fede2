"""tritonclient, unchanged, against a real server: unary, asynchronous, asyncio, streams."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from support.processes.probe import TABLE_ERROR
from support.processes.server import ServerProcess
from support.wire.inputs import DATATYPES, probe, tensor
from tritonclient.utils import InferenceServerException


@pytest.fixture
def server(plain: ServerProcess) -> ServerProcess:
    return plain


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits", "1")
    assert not client.is_model_ready("digits", "2")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "tensorferry"
    metadata = client.get_model_metadata("digits")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("image", "UINT8", [-1, 8, 8])]
    assert metadata.platform == "onnxruntime_onnx"
    index = client.get_model_repository_index()
    assert {model.name for model in index.models} >= {"digits", "probe"}


@pytest.mark.parametrize("name", DATATYPES)
def test_every_datatype(echoes: ServerProcess, name: str) -> None:
    dtype = DATATYPES[name]
    if name == "BYTES":
        array = np.array([["", "plain", "zwölf Boxkämpfer"], ["a\0b", "line\n", "終"]], dtype=object)
        expected = np.array([[text.encode() for text in row] for row in array], dtype=object)
    else:
        array = expected = np.array([[0, 1, 2], [1, 0, 100]]).astype(dtype)
    with triton.InferenceServerClient(echoes.address) as client:
        got = client.infer(f"echo-{name}", [tensor("x", array, name)]).as_numpy("y")
    np.testing.assert_array_equal(got, expected)
    assert name == "BYTES" or got.dtype == dtype


def test_outputs_by_name_in_the_requested_order(client: triton.InferenceServerClient) -> None:
    image = tensor("image", np.zeros((2, 8, 8), np.uint8), "UINT8")
    wanted = [triton.InferRequestedOutput("probabilities"), triton.InferRequestedOutput("label")]
    response = client.infer("digits", [image], outputs=wanted, request_id="seven").get_response()
    assert [output.name for output in response.outputs] == ["probabilities", "label"]
    assert (response.id, response.model_version) == ("seven", "1")


@pytest.mark.parametrize(
    ("model", "version", "inputs", "code", "message"),
    [
        ("other", "", [], "NOT_FOUND", "unknown model: 'other'"),
        ("probe", "7", [], "NOT_FOUND", "version 7 is not found"),
        ("probe", "one", [], "INVALID_ARGUMENT", "version string 'one'"),
        ("probe", "", probe(1)[:2], "INVALID_ARGUMENT", "missing required input(s) ['index']"),
        ("probe", "", probe(1) + probe(1)[:1], "INVALID_ARGUMENT", "input 'work' already exists"),
        ("probe", "", probe(1, index=99), "INTERNAL", TABLE_ERROR),
    ],
)
def test_errors(
    client: triton.InferenceServerClient, model: str, version: str, inputs: list[Any], code: str, message: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, inputs, model_version=version)
    assert caught.value.status() == f"StatusCode.{code}"
    assert message in caught.value.message()


def test_async_infer_and_cancel(server: ServerProcess, client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    calls = [
        client.async_infer(
            "probe", probe(tag), lambda result, error: answers.put((result, error)), request_id=str(tag)
        )
        for tag in range(50)
    ]
    assert len(calls) == 50
    for _ in calls:
        result, error = answers.get(timeout=30)
        assert error is None
        np.testing.assert_array_equal(
            result.as_numpy("y"), np.full((1, 4), 2 * int(result.get_response().id))
        )
    with server.standing_still():
        call = client.async_infer("probe", probe(1), lambda result, error: answers.put((result, error)))
        call.cancel()
        _, error = answers.get(timeout=30)
    assert error.status() == "StatusCode.CANCELLED"


@pytest.mark.parametrize(("asked", "got"), [(1, 1), (2, 2), (0, 2), (9, 2)])
def test_priority_and_timeout(client: triton.InferenceServerClient, asked: int, got: int) -> None:
    result = client.infer("probe", probe(1), priority=asked, timeout=60_000_000, parameters={"explain": True})
    assert result.get_response().parameters["priority"].int64_param == got


def test_stream_answers_in_request_order_and_survives_errors(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for tag in range(30):
        client.async_stream_infer("probe", probe(tag, index=99 if tag == 11 else 0), request_id=str(tag))
    for tag in range(30):
        result, error = answers.get(timeout=30)
        if tag == 11:
            assert TABLE_ERROR in error.message()
        else:
            assert error is None
            assert result.get_response().id == str(tag)
            np.testing.assert_array_equal(result.as_numpy("y"), np.full((1, 4), 2 * tag))
    client.stop_stream()


async def test_asyncio(server: ServerProcess) -> None:
    async with triton_aio.InferenceServerClient(server.address) as client:
        assert await client.is_model_ready("digits")
        inputs = [tensor("x", np.ones((3, 2), np.float32), "FP32")]
        result = await client.infer("echo", inputs)
        np.testing.assert_array_equal(result.as_numpy("y"), np.ones((3, 2)))

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for tag in range(20):
                yield {"model_name": "probe", "inputs": probe(tag), "request_id": str(tag)}

        seen = 0
        async for result, error in client.stream_infer(requests()):
            assert error is None
            np.testing.assert_array_equal(result.as_numpy("y"), np.full((1, 4), 2 * seen))
            seen += 1
        assert seen == 20
