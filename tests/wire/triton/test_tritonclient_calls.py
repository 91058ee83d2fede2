"""Calls of tritonclient: time limits, cancelling, compression, headers, keep-alive, many at once."""

from __future__ import annotations

import asyncio
import queue
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from support.processes import faulty
from support.processes.server import ServerProcess, running
from support.wire.inputs import probe, tensor
from tritonclient.utils import InferenceServerException

WAIT_SECONDS = 60
LATE_SECONDS = 0.2
Answers = queue.Queue[tuple[Any, Any]]


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
        assert float(client.infer("probe", probe(21)).as_numpy("y")[0, 0]) == 42


@pytest.fixture(scope="module")
def holding_server(
    transport: str, probe_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Holding]:
    release = tmp_path_factory.mktemp("holding") / "release"
    program = [sys.executable, str(Path(faulty.__file__))]
    variables = {faulty.RELEASE: str(release)}
    with running(probe_model, transport=transport, program=program, variables=variables) as server:
        yield Holding(server, release)


@pytest.fixture
def holding(holding_server: Holding) -> Iterator[Holding]:
    holding_server.release.unlink(missing_ok=True)
    yield holding_server
    holding_server.release.touch()
    with triton.InferenceServerClient(holding_server.server.address) as client:
        assert y(client.infer("probe", probe(21))) == 42


@pytest.fixture
async def aio(server: ServerProcess) -> AsyncIterator[triton_aio.InferenceServerClient]:
    async with triton_aio.InferenceServerClient(server.address) as client:
        yield client
        assert float((await client.infer("probe", probe(21))).as_numpy("y")[0, 0]) == 42


def y(result: Any) -> float:
    return float(result.as_numpy("y")[0, 0])


def into(answers: Answers) -> Callable[[Any, Any], None]:
    return lambda result, error: answers.put((result, error))


def status(error: InferenceServerException) -> str:
    return str(error.status())


# Time limits. A stopped server is late at any speed of the machine.


def test_every_call_has_a_time_limit(server: ServerProcess, client: triton.InferenceServerClient) -> None:
    def calls(limit: float) -> list[Callable[[], Any]]:
        return [
            lambda: client.is_server_live(client_timeout=limit),
            lambda: client.is_server_ready(client_timeout=limit),
            lambda: client.is_model_ready("probe", client_timeout=limit),
            lambda: client.get_server_metadata(client_timeout=limit),
            lambda: client.get_model_metadata("probe", client_timeout=limit),
            lambda: client.get_model_repository_index(client_timeout=limit),
            lambda: client.infer("probe", probe(1), client_timeout=limit),
        ]

    with server.standing_still():
        for call in calls(LATE_SECONDS / 4):
            with pytest.raises(InferenceServerException, match="Deadline Exceeded") as caught:
                call()
            assert status(caught.value) == "StatusCode.DEADLINE_EXCEEDED"
    for call in calls(WAIT_SECONDS):
        assert call()


def test_a_stream_that_is_late_ends_and_another_can_be_started(
    server: ServerProcess, client: triton.InferenceServerClient
) -> None:
    answers: Answers = queue.Queue()
    with server.standing_still():
        client.start_stream(into(answers), stream_timeout=LATE_SECONDS)
        # On a busy machine the stream is late before it has a request.
        with suppress(InferenceServerException):
            client.async_stream_infer("probe", probe(1))
        client.async_infer("probe", probe(1), into(answers), client_timeout=LATE_SECONDS)
        for _ in range(2):
            result, error = answers.get(timeout=WAIT_SECONDS)
            assert result is None
            assert status(error) == "StatusCode.DEADLINE_EXCEEDED"
    with pytest.raises(InferenceServerException, match="no longer in valid state"):
        client.async_stream_infer("probe", probe(1))
    client.stop_stream()
    client.start_stream(into(answers), stream_timeout=WAIT_SECONDS)
    client.async_stream_infer("probe", probe(4))
    assert y(answers.get(timeout=WAIT_SECONDS)[0]) == 8
    client.stop_stream()


async def test_asyncio_calls_and_streams_that_are_late(
    server: ServerProcess, aio: triton_aio.InferenceServerClient
) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "probe", "inputs": probe(1)}

    with server.standing_still():
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            await aio.infer("probe", probe(1), client_timeout=LATE_SECONDS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aio.stream_infer(requests(), stream_timeout=LATE_SECONDS))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# Cancelling.


def test_running_and_queued_requests_are_cancelled(holding: Holding) -> None:
    """A running request and some queued ones are cancelled; a queued request between them is answered."""
    answers: Answers = queue.Queue()
    kept: Answers = queue.Queue()
    with triton.InferenceServerClient(holding.server.address) as client:
        calls = [client.async_infer("probe", held(), into(answers)) for _ in range(3)]
        client.async_infer("probe", probe(5), into(kept))
        for call in calls:
            call.cancel()
        for _ in calls:
            result, error = answers.get(timeout=WAIT_SECONDS)
            assert result is None
            assert status(error) == "StatusCode.CANCELLED"
        holding.release.touch()
        result, error = kept.get(timeout=WAIT_SECONDS)
        assert error is None
        assert y(result) == 10


def test_every_third_of_many_is_cancelled_and_each_ends_once(client: triton.InferenceServerClient) -> None:
    """A cancel meets its request in any state: unsent, queued, in a batch, answered."""
    answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    waiting: dict[int, Any] = {}
    for tag in range(150):
        waiting[tag] = client.async_infer(
            "probe",
            probe(tag, work=tag % 5),
            lambda result, error, tag=tag: answers.put((tag, result, error)),
        )
        if tag >= 7 and tag % 3 == 0:
            waiting[tag - tag % 7].cancel()
    ended = set()
    for _ in waiting:
        tag, result, error = answers.get(timeout=WAIT_SECONDS)
        assert tag not in ended
        ended.add(tag)
        assert y(result) == 2 * tag if error is None else status(error) == "StatusCode.CANCELLED"
    assert answers.empty()


def test_a_cancelled_stream_reports_it_once_and_another_can_be_started(holding: Holding) -> None:
    answers: Answers = queue.Queue()
    with triton.InferenceServerClient(holding.server.address) as client:
        client.start_stream(into(answers))
        client.async_stream_infer("probe", probe(1))
        assert y(answers.get(timeout=WAIT_SECONDS)[0]) == 2
        for _ in range(5):
            client.async_stream_infer("probe", held())
        client.stop_stream(cancel_requests=True)
        # stop_stream waits for the reader, so no further answer can come.
        result, error = answers.get_nowait()
        assert result is None
        assert status(error) == "StatusCode.CANCELLED"
        assert answers.empty()
        holding.release.touch()
        client.start_stream(into(answers))
        client.async_stream_infer("probe", probe(2))
        assert y(answers.get(timeout=WAIT_SECONDS)[0]) == 4
        client.stop_stream()


async def test_an_asyncio_task_is_cancelled(holding: Holding) -> None:
    async with triton_aio.InferenceServerClient(holding.server.address) as aio:
        task = asyncio.create_task(aio.infer("probe", held()))
        await aio.is_server_live()  # So that the call has been sent.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_asyncio_stream_is_cancelled(holding: Holding) -> None:
    answered = asyncio.Event()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "probe", "inputs": probe(3)}
        # Otherwise both would be in one batch.
        await answered.wait()
        yield {"model_name": "probe", "inputs": held()}
        await asyncio.Event().wait()  # The client keeps the stream open.

    async with triton_aio.InferenceServerClient(holding.server.address) as aio:
        stream = aio.stream_infer(requests())
        result, error = await anext(stream)
        assert error is None
        assert y(result) == 6
        answered.set()
        assert stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await anext(stream)


# Ids, outputs and errors.


async def test_ids_come_back_in_every_kind_of_call(
    client: triton.InferenceServerClient, aio: triton_aio.InferenceServerClient
) -> None:
    answers: Answers = queue.Queue()
    assert client.infer("probe", probe(1), request_id="unary").get_response().id == "unary"
    client.async_infer("probe", probe(1), into(answers), request_id="asynchronous")
    assert answers.get(timeout=WAIT_SECONDS)[0].get_response().id == "asynchronous"
    client.start_stream(into(answers))
    client.async_stream_infer("probe", probe(1), request_id="ein Strom ∿")
    assert answers.get(timeout=WAIT_SECONDS)[0].get_response().id == "ein Strom ∿"
    client.stop_stream()
    assert (await aio.infer("probe", probe(1), request_id="asyncio")).get_response().id == "asyncio"
    assert client.infer("probe", probe(1)).get_response().id == ""


def test_requests_of_one_batch_get_their_own_requested_outputs(client: triton.InferenceServerClient) -> None:
    heldout = np.load(Path(__file__).resolve().parents[3] / "examples" / "digits" / "heldout.npz")
    together = client.infer("digits", [tensor("image", heldout["images"][:64], "UINT8")])
    answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    wanted = [["label"], ["probabilities"], ["probabilities", "label"], ["label", "probabilities"]]
    for place in range(64):
        client.async_infer(
            "digits",
            [tensor("image", heldout["images"][place : place + 1], "UINT8")],
            lambda result, error, place=place: answers.put((place, result, error)),
            outputs=[triton.InferRequestedOutput(name) for name in wanted[place % 4]],
        )
    for _ in range(64):
        place, result, error = answers.get(timeout=WAIT_SECONDS)
        assert error is None
        assert [output.name for output in result.get_response().outputs] == wanted[place % 4]
        if "label" in wanted[place % 4]:
            assert result.as_numpy("label").tolist() == [together.as_numpy("label")[place]]


# The channel.


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_compression_in_every_kind_of_call(
    client: triton.InferenceServerClient, aio: triton_aio.InferenceServerClient, algorithm: str
) -> None:
    array = np.tile(np.arange(1000, dtype=np.float32), (2, 50))
    inputs = [tensor("x", array, "FP32")]
    answers: Answers = queue.Queue()
    results = [client.infer("echo", inputs, compression_algorithm=algorithm)]
    client.async_infer("echo", inputs, into(answers), compression_algorithm=algorithm)
    client.start_stream(into(answers), compression_algorithm=algorithm)
    client.async_stream_infer("echo", inputs)
    for _ in range(2):
        result, error = answers.get(timeout=WAIT_SECONDS)
        assert error is None
        results.append(result)
    client.stop_stream()
    results.append(await aio.infer("echo", inputs, compression_algorithm=algorithm))
    for result in results:
        np.testing.assert_array_equal(result.as_numpy("y"), array)


def test_headers_reach_the_server_and_unknown_ones_are_ignored(
    client: triton.InferenceServerClient,
) -> None:
    headers = {"x-request": "7", "authorization": "Basic bm9ib2R5"}
    assert client.is_server_live(headers=headers)
    assert y(client.infer("probe", probe(3), headers=headers)) == 6


def test_a_header_asks_for_responses_in_order_of_completion(holding: Holding) -> None:
    """Without it, they come in request order."""
    answers: Answers = queue.Queue()
    with triton.InferenceServerClient(holding.server.address) as client:
        client.start_stream(into(answers), headers={"tensorferry-stream-order": "completion"})
        client.async_stream_infer("probe", held(), request_id="slow")
        client.async_stream_infer("nobody", probe(1), request_id="refused")
        assert "unknown model" in answers.get(timeout=WAIT_SECONDS)[1].message()
        holding.release.touch()
        assert answers.get(timeout=WAIT_SECONDS)[0].get_response().id == "slow"
        client.stop_stream()


def test_keep_alive_and_channel_arguments(server: ServerProcess) -> None:
    """Pings are much rarer than the server's limit, and they are sent while no call is active."""
    alive = triton.KeepAliveOptions(
        keepalive_time_ms=10_000,
        keepalive_timeout_ms=5_000,
        keepalive_permit_without_calls=True,
        http2_max_pings_without_data=0,
    )
    with triton.InferenceServerClient(server.address, keepalive_options=alive) as client:
        assert y(client.infer("probe", probe(3))) == 6
    arguments = [("grpc.max_receive_message_length", 1000), ("grpc.primary_user_agent", "somebody")]
    with triton.InferenceServerClient(server.address, channel_args=arguments) as client:
        assert y(client.infer("probe", probe(3))) == 6
        with pytest.raises(InferenceServerException) as caught:
            client.infer("echo", [tensor("x", np.zeros((1, 1000), np.float32), "FP32")])
        assert status(caught.value) == "StatusCode.RESOURCE_EXHAUSTED"
