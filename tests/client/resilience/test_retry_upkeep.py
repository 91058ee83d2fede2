"""Resources of retries: the budget, the request, the retry thread, and futures at close."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from client.resilience.test_retry import Full
from client.scripted import Hang, ScriptedServer
from polling import until

from tensorferry.client import Cancelled, InferenceClient, InferenceFuture
from tensorferry.protos import inference_pb2 as pb

INPUTS = {"x": np.zeros(1, np.int64)}
# Longer than any test waits.
NEVER_MS = "60000"


def script(server: ScriptedServer, *arguments: Any) -> Full:
    full = Full(*arguments)
    server.servicer.infer, server.servicer.stream = full.infer, full.stream
    return full


def refusals(server: ScriptedServer, client: InferenceClient, count: int = 1) -> list[InferenceFuture]:
    """Wait until `count` futures wait for their retry."""
    script(server, 1000, NEVER_MS)
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
    script(server, 1)
    assert client.submit("row", INPUTS, request_id="soon").result(30).id == "soon"
    assert not any(future.done() for future in futures)
    for future in futures:
        assert future.cancel()
    thread.join(30)
    assert not thread.is_alive()


def test_a_refusal_after_close_fails_its_future(server: ScriptedServer, client: InferenceClient) -> None:
    script(server, 1, NEVER_MS)
    client._retry_queue.close()
    assert isinstance(client.submit("row", INPUTS).exception(30), Cancelled)
