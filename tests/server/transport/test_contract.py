"""What every transport promises the service and the client of a unary call: both of gRPC, and HTTP."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc
import pytest
from support.server.http_rig import RawClient, post, served_http
from support.server.rig import PATIENCE
from support.server.scripted_service import ScriptedService, opened, success

from tensorferry.batcher import DeadlineExceeded, QueueFull
from tensorferry.server.errors import InvalidRequestError, NotFoundError
from tensorferry.server.identity import ANONYMOUS

_CODES = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL",
          503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}  # fmt: skip


class Refused(NamedTuple):
    """An error as the client sees it. `retry_ms` is "" without a hint."""

    code: str
    text: str
    retry_ms: str


class Call(Protocol):
    """A call in progress."""

    def id(self) -> str:
        """Wait for the answer, and return its id."""

    def refused(self) -> Refused:
        """Wait for the error."""

    def leave(self) -> None:
        """Cancel the call, or end its connection."""


class GrpcCall:
    def __init__(self, future: Any) -> None:
        self._future = future

    def id(self) -> str:
        return str(self._future.result(PATIENCE).id)

    def refused(self) -> Refused:
        error = self._future.exception(PATIENCE)
        trailing = dict(error.trailing_metadata())
        return Refused(error.code().name, error.details(), str(trailing.get("grpc-retry-pushback-ms", "")))

    def leave(self) -> None:
        self._future.cancel()


class HttpCall:
    def __init__(self, client: RawClient) -> None:
        self._client = client

    def id(self) -> str:
        answer = self._client.read()
        assert answer.status == 200, answer
        head = int(answer.headers.get("inference-header-content-length", len(answer.body)))
        return str(json.loads(answer.body[:head])["id"])

    def refused(self) -> Refused:
        answer = self._client.read()
        return Refused(_CODES[answer.status], answer.error, answer.headers.get("retry-after-ms", ""))

    def leave(self) -> None:
        self._client.close()


@dataclass(frozen=True)
class Door:
    """A scripted service behind a transport. `infer` takes a request's id, headers and seconds until its deadline."""

    service: ScriptedService
    infer: Callable[..., Call]


Serve = Callable[..., Door]


@contextmanager
def door(transport: str, **options: Any) -> Iterator[Door]:
    if transport != "http":
        with contextmanager(opened)(transport, **options) as served:

            def infer(
                request_id: str, headers: Sequence[tuple[str, str]] = (), seconds: float | None = None
            ) -> Call:
                return GrpcCall(served.infer(request_id, metadata=headers, timeout=seconds))

            yield Door(served.service, infer)
        return
    with served_http(**options) as over_http:

        def post_infer(
            request_id: str, headers: Sequence[tuple[str, str]] = (), seconds: float | None = None
        ) -> Call:
            named = dict(headers)
            if seconds is not None:
                named["X-Request-Timeout"] = str(seconds)
            body = {"id": request_id, "inputs": [], "parameters": {"binary_data_output": True}}
            client = over_http.client()
            client.send(post("/v2/models/m/infer", body, **named))
            return HttpCall(client)

        yield Door(over_http.service, post_infer)


@pytest.fixture(params=["threaded", "lane", "http"])
def serve_door(request: pytest.FixtureRequest) -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(door(request.param, **options))


@pytest.fixture
def served_door(serve_door: Serve) -> Door:
    return serve_door()


def others_are_served(served: Door) -> None:
    call = served.infer("other")
    served.service.await_received(len(served.service.received) + ("other" not in served.service.received))
    served.service.answer("other")
    assert call.id() == "other"


def test_headers_and_the_deadline_reach_the_service(served_door: Door) -> None:
    sent, before = [("traceparent", "00-1"), ("authorization", "Bearer t")], time.monotonic()
    with_deadline, without = served_door.infer("1", sent, PATIENCE), served_door.infer("2")
    served_door.service.await_received(2)
    served_door.service.answer("1", "2")
    assert (with_deadline.id(), without.id()) == ("1", "2")
    assert set(sent) <= set(served_door.service.metadata["1"])
    assert served_door.service.callers["1"] is ANONYMOUS
    # gRPC rounds a timeout up.
    assert before < served_door.service.deadlines["1"] < time.monotonic() + 2 * PATIENCE
    assert served_door.service.deadlines["2"] == math.inf


def test_calls_are_answered_in_any_order(served_door: Door) -> None:
    calls = {name: served_door.infer(name) for name in ("1", "2", "3")}
    served_door.service.await_received(3)
    for name in ("3", "1", "2"):
        served_door.service.answer(name)
        assert calls[name].id() == name


def test_a_large_answer_arrives_complete(served_door: Door) -> None:
    served_door.service.answer_at_once = lambda request_id: success(request_id, 3_000_000)
    assert served_door.infer("1").id() == "1"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequestError("zwölf 🚢\nand a line, 100 %"), Refused("INVALID_ARGUMENT", "zwölf 🚢\nand a line, 100 %", "")),
        (NotFoundError("no such model"), Refused("NOT_FOUND", "no such model", "")),
        (QueueFull("the queue is full", 0.25), Refused("RESOURCE_EXHAUSTED", "the queue is full", "250")),
        (DeadlineExceeded("too late"), Refused("DEADLINE_EXCEEDED", "too late", "")),
    ],
)  # fmt: skip
def test_an_error_has_its_status_its_text_and_when_to_retry(
    served_door: Door, error: Exception, expected: Refused
) -> None:
    call = served_door.infer("1")
    served_door.service.await_received(1)
    served_door.service.fail("1", error)
    refused = call.refused()
    assert (refused.code, refused.retry_ms) == (expected.code, expected.retry_ms)
    assert refused.text.endswith(expected.text)


def test_an_unexpected_error_is_internal_and_says_nothing_of_its_cause(
    served_door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    call = served_door.infer("1")
    served_door.service.await_received(1)
    served_door.service.fail("1", RuntimeError("secret"))
    refused = call.refused()
    assert refused == Refused("INTERNAL", "internal error; the server's log has the details", "")
    assert "secret" in caplog.text
    # The traceback in the log holds the transport.
    caplog.clear()


def test_a_client_that_leaves_cancels_its_call_and_no_other(served_door: Door) -> None:
    left, other = served_door.infer("left"), served_door.infer("stays")
    served_door.service.await_received(2)
    left.leave()
    served_door.service.await_cancelled(1)
    served_door.service.answer("stays")
    assert other.id() == "stays"
    assert served_door.service.cancelled == ["left"]


def test_a_call_above_the_limit_is_refused_with_a_retry_hint(serve_door: Serve) -> None:
    """It is refused before its message is read, and counted; both other calls are answered."""
    served = serve_door(max_calls=2)
    held = [served.infer(str(number)) for number in range(2)]
    served.service.await_received(2)
    refused = served.infer("refused").refused()
    assert (refused.code, refused.retry_ms) == ("RESOURCE_EXHAUSTED", "100")
    assert "2 calls are in progress" in refused.text
    assert sorted(served.service.received) == ["0", "1"]
    assert served.service.refused == {grpc.StatusCode.RESOURCE_EXHAUSTED: 1}
    served.service.answer("0", "1")
    assert sorted(call.id() for call in held) == ["0", "1"]
    others_are_served(served)


def test_a_draining_server_refuses_calls_before_their_message_is_read(served_door: Door) -> None:
    served_door.service.begin_drain()
    assert served_door.infer("late").refused().code == "UNAVAILABLE"
    assert not served_door.service.received
