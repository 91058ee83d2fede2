"""Retries after RESOURCE_EXHAUSTED: after the server's pause, within the timeout and the budget."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from client.calls import both_clients, either
from client.scripted import Answers, Hang, Requests, ScriptedServer, echo, streamed
from polling import until

from tensorferry.client import Cancelled, InferenceClient, InferenceFuture, ResourceExhausted, Retry
from tensorferry.client.connection.retry import DEFAULT_RETRY, RetryBudget
from tensorferry.client.errors import InferenceError, of_code
from tensorferry.protos import inference_pb2 as pb

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INPUTS = {"x": np.zeros(1, np.int64)}
# Budget left of 100 before a test; each answer returns 0.1.
LEFT = 50.0
# Short, because tests wait for it; and longer than any test waits.
RETRY_MS, NEVER_MS = 20, "60000"


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
    retries = RetryBudget(Retry(), lambda: chance)
    assert retries.delay(refused(), attempt, left) == delay
    # RESOURCE_EXHAUSTED without a retry time, as for an oversized message, and another code.
    assert retries.delay(refused(None), 1, None) is None
    assert retries.delay(refused(2.0, grpc.StatusCode.UNKNOWN), 1, None) is None


def test_programs_of_one_seed_do_not_return_together() -> None:
    pauses = set()
    for _ in range(2):
        random.seed(1)
        pauses.add(RetryBudget(Retry()).delay(refused(), 1, None))
    assert len(pauses) == 2


def test_any_number_of_retries_without_a_pause() -> None:
    retries = RetryBudget(Retry(attempts=10_000, budget=10_000))
    assert retries.delay(refused(0.0), 9_999, None) == 0


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

    def stream(self, requests: Requests, context: grpc.ServicerContext) -> Answers:
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


@pytest.fixture
def full(server: ScriptedServer) -> Callable[..., Full]:
    def make(*arguments: Any) -> Full:
        script = Full(*arguments)
        server.servicer.infer, server.servicer.stream = script.infer, script.stream
        return script

    return make


@pytest.mark.parametrize("method", ["infer", "submit"])
@both_clients
async def test_a_refused_call_is_sent_again_after_the_pause(
    server: ScriptedServer, full: Callable[..., Full], kind: type[Any], method: str
) -> None:
    script = full(2)
    client = kind(server.target)
    assert (await either(client, method, "row", INPUTS, request_id="a")).id == "a"
    await either(client, "close")
    assert len(script.asked) == 3
    assert script.paused()


@both_clients
@pytest.mark.parametrize("ordered", [False, True])
async def test_a_refused_request_of_a_stream_is_sent_again_as_a_unary_call(
    server: ScriptedServer, full: Callable[..., Full], kind: type[Any], ordered: bool
) -> None:
    """Each answer refills the budget once: four arrive in the stream, four after a retry."""
    script = full(1)
    client = kind(server.target)
    client._retries._left = LEFT
    results = await either(client, "stream", "row", (INPUTS for _ in range(8)), ordered=ordered)
    await either(client, "close")
    assert len({result.id for result in results}) == 8
    assert len(script.asked) == 5
    assert client._retries._left == pytest.approx(LEFT - 5 + 0.8)


def test_the_server_or_the_caller_forbids_a_retry(server: ScriptedServer, full: Callable[..., Full]) -> None:
    for retry, pushback in ((DEFAULT_RETRY, "-1"), (DEFAULT_RETRY, "soon"), (None, str(RETRY_MS))):
        script = full(9, pushback)
        with InferenceClient(server.target, retry=retry) as client, pytest.raises(ResourceExhausted):
            client.infer("row", INPUTS)
        assert len(script.asked) == 1


def test_no_longer_than_the_timeout(client: InferenceClient, full: Callable[..., Full]) -> None:
    """A pause longer than the remaining timeout raises the error at once."""
    script = full(9, NEVER_MS)
    for begin in (
        lambda: client.infer("row", INPUTS, timeout=30),
        lambda: client.submit("row", INPUTS, timeout=30).result(30),
        lambda: list(client.stream("row", [INPUTS, INPUTS], timeout=0.01)),
    ):
        with pytest.raises((ResourceExhausted, InferenceError)):
            begin()
    assert len(script.asked) == 2


@both_clients
async def test_close_ends_the_wait(
    server: ScriptedServer, full: Callable[..., Full], kind: type[Any]
) -> None:
    full(9, NEVER_MS)
    client = kind(server.target)
    if isinstance(client, InferenceClient):
        waiting = asyncio.create_task(asyncio.to_thread(client.infer, "row", INPUTS))
    else:
        waiting = client.submit("row", INPUTS)
    await asyncio.to_thread(until, lambda: client._retries._left < 100)
    await either(client, "close")
    with pytest.raises(Cancelled):
        await waiting


# Resources: the request, the retry thread, and futures at close


def refusals(server: ScriptedServer, client: InferenceClient, count: int = 1) -> list[InferenceFuture]:
    """Wait until `count` futures wait for their retry."""
    server.servicer.infer = Full(1000, NEVER_MS).infer
    futures = [client.submit("row", INPUTS, request_id=str(number)) for number in range(count)]
    until(lambda: client._retries._left == 100 - count)
    return futures


def answered(server: ScriptedServer, client: InferenceClient) -> InferenceFuture:
    future = client.submit("row", INPUTS)
    future.result(30)
    return future


def cancelled_in_flight(server: ScriptedServer, client: InferenceClient) -> InferenceFuture:
    hang = Hang()
    server.servicer.infer = hang.infer
    future = client.submit("row", INPUTS)
    assert hang.begun.wait(30)
    assert future.cancel()
    return future


def cancelled_while_it_waits(server: ScriptedServer, client: InferenceClient) -> InferenceFuture:
    [future] = refusals(server, client)
    assert future.cancel()
    return future


def closed_while_it_waits(server: ScriptedServer, client: InferenceClient) -> InferenceFuture:
    [future] = refusals(server, client)
    client.close()
    error = future.exception(30)
    assert isinstance(error, Cancelled)
    assert (error.code, error.request_id) == (grpc.StatusCode.CANCELLED, "0")
    return future


@pytest.mark.parametrize(
    "end", [answered, cancelled_in_flight, cancelled_while_it_waits, closed_while_it_waits]
)
def test_a_completed_future_releases_its_request(
    server: ScriptedServer,
    client: InferenceClient,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[ScriptedServer, InferenceClient], InferenceFuture],
) -> None:
    encode = client._encode
    requests: list[pb.ModelInferRequest] = []

    def remembered(*arguments: Any) -> pb.ModelInferRequest:
        requests.append(encode(*arguments))
        return requests[-1]

    monkeypatch.setattr(client, "_encode", remembered)
    future = end(server, client)
    alone = [object()]

    def let_go() -> bool:
        gc.collect()
        return sys.getrefcount(requests[0]) == sys.getrefcount(alone[0])

    until(let_go)
    assert future.done()


def test_one_thread_retries_all_in_order_of_due_time(server: ScriptedServer, client: InferenceClient) -> None:
    """A long wait does not delay a shorter one, and the thread ends with the last retry."""
    futures = refusals(server, client, 20)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "tensorferry-retry"]
    server.servicer.infer = Full(1).infer
    assert client.submit("row", INPUTS, request_id="soon").result(30).id == "soon"
    assert not any(future.done() for future in futures)
    for future in futures:
        assert future.cancel()
    thread.join(30)
    assert not thread.is_alive()


def test_a_refusal_after_close_fails_its_future(server: ScriptedServer, client: InferenceClient) -> None:
    server.servicer.infer = Full(1, NEVER_MS).infer
    client._retry_queue.close()
    assert isinstance(client.submit("row", INPUTS).exception(30), Cancelled)
