"""Retries after RESOURCE_EXHAUSTED: after the server's pause, within the timeout and the budget."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from client.scripted import ScriptedServer, echo, streamed
from polling import until

from tensorferry.client import Cancelled, InferenceClient, ResourceExhausted, Retry, aio
from tensorferry.client.connection.retry import RetryBudget
from tensorferry.client.errors import InferenceError, of_code
from tensorferry.protos import inference_pb2 as pb

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INPUTS = {"x": np.zeros(1, np.int64)}
# Short, because tests wait for it.
RETRY_MS = 20


def refused(retry_after: float | None = 2.0, code: grpc.StatusCode = EXHAUSTED) -> InferenceError:
    return of_code(code, "full", "", retry_after)


@pytest.mark.parametrize(
    ("attempt", "chance", "left", "delay"),
    [
        pytest.param(1, 0.0, None, 2.0, id="never earlier than the server asks"),
        pytest.param(1, 1.0, None, 4.0, id="up to as long again"),
        pytest.param(3, 1.0, None, 10.0, id="more with each refusal"),
        pytest.param(3, 1.0, 5.0, 3.5, id="within the timeout"),
        pytest.param(1, 0.0, 1.9, None, id="the time that the server asks for is too late"),
        pytest.param(5, 0.0, None, None, id="often enough"),
    ],
)
def test_pause_before_a_retry(attempt: int, chance: float, left: float | None, delay: float | None) -> None:
    assert RetryBudget(Retry(), lambda: chance).delay(refused(), attempt, left) == delay


@pytest.mark.parametrize(
    "error", [refused(None), refused(2.0, grpc.StatusCode.UNKNOWN)], ids=["no retry time", "another code"]
)
def test_errors_that_are_not_retried(error: InferenceError) -> None:
    """RESOURCE_EXHAUSTED without a retry time, as for an oversized message, is not retried."""
    assert RetryBudget(Retry()).delay(error, 1, None) is None


def test_the_budget_bounds_retries() -> None:
    retries = RetryBudget(Retry(budget=3, ratio=0.5))
    assert [retries.delay(refused(), 1, None) is not None for _ in range(5)] == [True] * 3 + [False] * 2
    retries.answered()
    assert retries.delay(refused(), 1, None) is None
    retries.answered()
    assert retries.delay(refused(), 1, None) is not None
    for _ in range(100):
        retries.answered()
    assert sum(retries.delay(refused(), 1, None) is not None for _ in range(9)) == 3


@pytest.mark.parametrize("options", [{"attempts": 0}, {"budget": -1}, {"ratio": float("nan")}], ids=str)
def test_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=" expects a"):
        Retry(**options)


class Full:
    """Servicer that refuses each request `times` times and records when each arrived."""

    def __init__(self, times: int, retry_after: str = str(RETRY_MS)) -> None:
        self.times = times
        self.retry_after = retry_after
        self.asked: list[float] = []

    def infer(self, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        self.asked.append(time.monotonic())
        if len(self.asked) <= self.times:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", self.retry_after),))
            context.abort(EXHAUSTED, "the queue is full")
        return echo(request)

    def stream(
        self, requests: Iterator[pb.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ModelStreamInferResponse]:
        """Refuse every second request."""
        for number, request in enumerate(requests):
            if number % 2:
                answer = pb.ModelStreamInferResponse(error_message="the queue is full")
                answer.infer_response.id = request.id
                parameters = answer.infer_response.parameters
                parameters["tensorferry_status"].string_param = "RESOURCE_EXHAUSTED"
                parameters["tensorferry_retry_after_ms"].int64_param = RETRY_MS
                yield answer
            else:
                yield streamed(request)

    def paused(self) -> bool:
        return all(
            after - before >= RETRY_MS / 1e3
            for before, after in zip(self.asked, self.asked[1:], strict=False)
        )


def await_refusal(client: InferenceClient | aio.InferenceClient) -> None:
    """Wait until a refused request waits for its retry, which has taken its part of the budget."""
    until(lambda: client._retries._left < 100)


@pytest.fixture
def full(server: ScriptedServer) -> Callable[..., Full]:
    def make(*arguments: Any) -> Full:
        script = Full(*arguments)
        server.servicer.infer, server.servicer.stream = script.infer, script.stream
        return script

    return make


def test_infer(client: InferenceClient, full: Callable[..., Full]) -> None:
    script = full(2)
    assert client.infer("row", INPUTS, request_id="a").id == "a"
    assert len(script.asked) == 3
    assert script.paused()


def test_submit(client: InferenceClient, full: Callable[..., Full]) -> None:
    script = full(2)
    assert client.submit("row", INPUTS, request_id="a").result(30).id == "a"
    assert len(script.asked) == 3
    assert script.paused()


async def test_aio(aclient: aio.InferenceClient, full: Callable[..., Full]) -> None:
    script = full(2)
    assert (await aclient.infer("row", INPUTS, request_id="a")).id == "a"
    assert len(script.asked) == 3
    assert script.paused()


@pytest.mark.parametrize("ordered", [False, True])
def test_stream(client: InferenceClient, full: Callable[..., Full], ordered: bool) -> None:
    """A refused request of a stream is sent again as a unary call, and all are answered."""
    script = full(1)
    results = list(client.stream("row", (INPUTS for _ in range(8)), ordered=ordered))
    assert len({result.id for result in results}) == 8
    assert len(script.asked) == 5


async def test_aio_stream(aclient: aio.InferenceClient, full: Callable[..., Full]) -> None:
    script = full(1)
    results = [result async for result in aclient.stream("row", (INPUTS for _ in range(8)), ordered=True)]
    assert len({result.id for result in results}) == 8
    assert len(script.asked) == 5


@pytest.mark.parametrize("pushback", ["-1", "soon"])
def test_the_server_forbids_a_retry(
    client: InferenceClient, full: Callable[..., Full], pushback: str
) -> None:
    script = full(9, pushback)
    with pytest.raises(ResourceExhausted):
        client.infer("row", INPUTS)
    assert len(script.asked) == 1


def test_no_longer_than_the_timeout(client: InferenceClient, full: Callable[..., Full]) -> None:
    """A pause longer than the remaining timeout raises the error at once."""
    script = full(9, "60000")
    for call in (
        lambda: client.infer("row", INPUTS, timeout=30),
        lambda: client.submit("row", INPUTS, timeout=30).result(30),
        lambda: list(client.stream("row", [INPUTS, INPUTS], timeout=0.01)),
    ):
        with pytest.raises((ResourceExhausted, InferenceError)):
            call()
    assert len(script.asked) == 2


def test_no_retry(server: ScriptedServer, full: Callable[..., Full]) -> None:
    script = full(1)
    with InferenceClient(server.target, retry=None) as client, pytest.raises(ResourceExhausted):
        client.infer("row", INPUTS)
    assert len(script.asked) == 1


def test_a_future_that_waits_can_be_cancelled(client: InferenceClient, full: Callable[..., Full]) -> None:
    script = full(9, "60000")
    future = client.submit("row", INPUTS)
    await_refusal(client)
    assert future.cancel()
    assert future.cancelled()
    assert len(script.asked) == 1


def test_close_ends_the_wait(server: ScriptedServer, full: Callable[..., Full]) -> None:
    full(9, "60000")
    client = InferenceClient(server.target)
    failures: list[BaseException] = []

    def infer() -> None:
        try:
            client.infer("row", INPUTS)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=infer)
    thread.start()
    await_refusal(client)
    client.close()
    thread.join(30)
    assert isinstance(failures[0], Cancelled)


async def test_aio_close_ends_the_wait(server: ScriptedServer, full: Callable[..., Full]) -> None:
    full(9, "60000")
    client = aio.InferenceClient(server.target)
    task = client.submit("row", INPUTS)
    await asyncio.to_thread(await_refusal, client)
    await client.close()
    with pytest.raises(Cancelled):
        await task
