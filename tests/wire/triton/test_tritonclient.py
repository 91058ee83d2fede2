"""tritonclient, unchanged, against a real server: every kind of call, cancelling, compression, and errors."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from support.processes import faulty
from support.processes.probe import TABLE_ERROR
from support.processes.server import ServerProcess, running
from support.wire.inputs import DATATYPES, probe, tensor
from support.wire.rig import Answers, Stream

LATE_SECONDS = 0.2


class Holding(NamedTuple):
    """A server that holds a run of the requests `held` until the file exists."""

    server: ServerProcess
    release: Path


def held() -> list[triton.InferInput]:
    return probe(int(faulty.HANG))


@pytest.fixture
def server(plain: ServerProcess) -> ServerProcess:
    return plain


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client
        # After every cancelled or late call the server still serves.
        assert y(client.infer("probe", probe(21))) == 42


@pytest.fixture
def holding(transport: str, probe_model: Path, tmp_path: Path) -> Iterator[Holding]:
    program = [sys.executable, str(Path(faulty.__file__))]
    variables = {faulty.RELEASE: str(tmp_path / "release")}
    with running(probe_model, transport=transport, program=program, variables=variables) as server:
        yield Holding(server, tmp_path / "release")


def y(result: Any) -> float:
    return float(result.as_numpy("y")[0, 0])


def cancelled(answers: Answers) -> bool:
    return bool(answers.error().status() == "StatusCode.CANCELLED")


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


@pytest.mark.parametrize(("asked", "got"), [(1, 1), (2, 2), (0, 2), (9, 2)])
def test_priority_and_timeout(client: triton.InferenceServerClient, asked: int, got: int) -> None:
    result = client.infer("probe", probe(1), priority=asked, timeout=60_000_000, parameters={"explain": True})
    assert result.get_response().parameters["priority"].int64_param == got


def test_stream_answers_in_request_order_and_survives_errors(client: triton.InferenceServerClient) -> None:
    with Stream(client) as stream:
        for tag in range(30):
            stream.send("probe", probe(tag, index=99 if tag == 11 else 0), str(tag))
        for tag in range(30):
            if tag == 11:
                assert TABLE_ERROR in stream.error().message()
            else:
                result = stream.result()
                assert (result.get_response().id, y(result)) == (str(tag), 2 * tag)


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


# A stopped server is late at any speed of the machine.


def test_a_stream_and_a_call_that_are_late_end_and_others_can_be_started(
    server: ServerProcess, client: triton.InferenceServerClient
) -> None:
    answers = Answers()
    with server.standing_still():
        client.start_stream(answers.put, stream_timeout=LATE_SECONDS)
        client.async_infer("probe", probe(1), answers.put, client_timeout=LATE_SECONDS)
        for _ in range(2):
            assert answers.error().status() == "StatusCode.DEADLINE_EXCEEDED"
    client.stop_stream()
    with Stream(client) as stream:
        stream.send("probe", probe(4), "")
        assert y(stream.result()) == 8


def test_every_third_of_many_is_cancelled_and_each_ends_once(client: triton.InferenceServerClient) -> None:
    """A cancel meets its request in any state: unsent, queued, in a batch, answered."""
    answers = [Answers() for _ in range(150)]
    calls: list[Any] = []
    for tag, ended in enumerate(answers):
        calls.append(client.async_infer("probe", probe(tag, work=tag % 5), ended.put))
        if tag >= 7 and tag % 3 == 0:
            calls[tag - tag % 7].cancel()
    for tag, ended in enumerate(answers):
        result, error = ended.next()
        assert y(result) == 2 * tag if error is None else error.status() == "StatusCode.CANCELLED"
    assert all(ended.is_empty for ended in answers)


def test_a_cancelled_stream_reports_it_once_and_another_can_be_started(holding: Holding) -> None:
    with triton.InferenceServerClient(holding.server.address) as client:
        # Its end cancels the requests, and waits for the reader, so no further answer can come.
        with Stream(client) as stream:
            stream.send("probe", probe(1), "")
            assert y(stream.result()) == 2
            for _ in range(5):
                stream.send("probe", held(), "")
        assert cancelled(stream)
        assert stream.is_empty
        holding.release.touch()
        with Stream(client) as stream:
            stream.send("probe", probe(2), "")
            assert y(stream.result()) == 4


def test_requests_of_one_batch_get_their_own_requested_outputs(client: triton.InferenceServerClient) -> None:
    heldout = np.load(Path(__file__).resolve().parents[3] / "examples" / "digits" / "heldout.npz")
    together = client.infer("digits", [tensor("image", heldout["images"][:64], "UINT8")])
    answers = [Answers() for _ in range(64)]
    wanted = [["label"], ["probabilities"], ["probabilities", "label"], ["label", "probabilities"]]
    for place, answer in enumerate(answers):
        image = tensor("image", heldout["images"][place : place + 1], "UINT8")
        outputs = [triton.InferRequestedOutput(name) for name in wanted[place % 4]]
        client.async_infer("digits", [image], answer.put, outputs=outputs)
    for place, answer in enumerate(answers):
        result = answer.result()
        assert [output.name for output in result.get_response().outputs] == wanted[place % 4]
        if "label" in wanted[place % 4]:
            assert result.as_numpy("label").tolist() == [together.as_numpy("label")[place]]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_of_calls_and_streams(client: triton.InferenceServerClient, algorithm: str) -> None:
    array, answers = np.tile(np.arange(1000, dtype=np.float32), (2, 50)), Answers()
    inputs = [tensor("x", array, "FP32")]
    results = [client.infer("echo", inputs, compression_algorithm=algorithm)]
    client.start_stream(answers.put, compression_algorithm=algorithm)
    client.async_stream_infer("echo", inputs)
    results.append(answers.result())
    client.stop_stream()
    for result in results:
        np.testing.assert_array_equal(result.as_numpy("y"), array)
