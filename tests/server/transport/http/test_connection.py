"""Connections: requests one after the other, their ends, and clients that do not keep to the protocol."""

from __future__ import annotations

import gc
import gzip
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from polling import until
from support.server.http_rig import ServedHttp, get, post
from support.server.rig import PATIENCE
from support.server.scripted_service import success

from tensorferry.server.errors import ResponseTooLargeError
from tensorferry.server.transport.http import application
from tensorferry.server.transport.http import connection as connections
from tensorferry.server.transport.http.errors import HttpError

Serve = Callable[..., ServedHttp]
INFER = "/v2/models/m/infer"


@pytest.fixture
def served(serve: Serve) -> ServedHttp:
    return serve()


def request(request_id: str, **more: Any) -> dict[str, Any]:
    return {"id": request_id, "inputs": [], **more}


def test_a_request_may_arrive_byte_by_byte(served: ServedHttp) -> None:
    served.service.answer_at_once = success
    client = served.client()
    for byte in b"\r\n" + post(INFER, request("slow")):
        client.send(bytes([byte]))
    assert client.read().json["id"] == "slow"


def test_pipelined_requests_are_answered_in_their_order(served: ServedHttp) -> None:
    client = served.client()
    client.send(b"".join(post(INFER, request(f"r{number}")) for number in range(3)) + get("/v2/health/live"))
    for number in range(3):
        served.service.await_received(number + 1)
        assert len(served.service.received) == number + 1
        served.service.answer(f"r{number}")
        assert client.read().json["id"] == f"r{number}"
    assert client.read().json == {"live": True}


def test_thousands_of_pipelined_requests_are_answered(served: ServedHttp) -> None:
    client = served.client()
    sender = threading.Thread(target=client.send, args=(b"GET /x HTTP/1.1\r\nHost:\r\n\r\n" * 5000,))
    sender.start()
    assert {client.read().status for _ in range(5000)} == {404}
    sender.join(PATIENCE)


def test_an_error_that_is_answered_again_keeps_nothing_of_its_requests(served: ServedHttp) -> None:
    client = served.client()
    for _ in range(3):
        client.send(get("/unknown"))
        assert client.read().status == 404

    def kept() -> int:
        exchanges = (each for each in gc.get_objects() if isinstance(each, connections.Exchange))
        return sum(each.head.path == "/unknown" for each in exchanges)

    until(kept, lambda count: not count)


def test_a_client_that_waits_for_100_is_told_to_go_on(served: ServedHttp) -> None:
    served.service.answer_at_once = success
    client = served.client()
    data = post(INFER, request("large"), Expect="100-continue")
    end = data.index(b"\r\n\r\n") + 4
    client.send(data[:end])
    assert client.read().status == 100
    client.send(data[end:])
    assert client.read().json["id"] == "large"


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_a_client_may_ask_for_the_end_of_the_connection(served: ServedHttp, version: str) -> None:
    client = served.client()
    client.send(f"GET /v2/health/live {version}\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
    assert client.read().headers["connection"] == "close"
    assert client.ended()


REFUSED: dict[str, tuple[bytes, int, str]] = {
    "http2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "this port speaks HTTP/1.1; gRPC is at 127.0.0.1:8001"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00", 400, "this port is without TLS"),
    "bare-line-feeds": (b"GET / HTTP/1.1\nHost: h\n\n", 400, "malformed"),
    "long-head": (b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000, 431, "more than 16384 bytes"),
    "large-body": (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999\r\n\r\n", 413, "takes at most"),
    "large-chunks": (
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n", 413, "takes at most",
    ),
    "smuggled": (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "Content-Length"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "status", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_is_answered_and_ends_the_connection(
    served: ServedHttp, data: bytes, status: int, reason: str
) -> None:
    client = served.client()
    client.send(data)
    answer = client.read()
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert reason in answer.error
    assert client.ended()


@pytest.mark.parametrize(
    "data", [b"", b"GET / HT", post(INFER, request("r"))[:-1]], ids=["idle", "head", "body"]
)
def test_a_connection_that_waits_too_long_is_ended(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    for name in ("_ARRIVAL_SECONDS", "_IDLE_SECONDS"):
        monkeypatch.setattr(connections, name, 0.0)
    monkeypatch.setattr("tensorferry.server.transport.http.server._SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(connections, "_LEAST_BYTES_PER_SECOND", 1e9)
    client = serve().client()
    client.send(data)
    if data:
        assert client.read().status == 408
    assert client.ended()


def test_long_json_is_handled_without_stopping_the_others(served: ServedHttp) -> None:
    served.service.answer_at_once = lambda request_id: success(
        request_id, 100_000 if request_id == "long" else 0
    )
    long = request(
        "long", inputs=[{"name": "x", "datatype": "INT64", "shape": [50_000], "data": [1] * 50_000}]
    )
    answer = served.infer(long)
    assert answer.json["outputs"][0]["data"] == [0] * 100_000
    assert served.infer(request("r")).json["id"] == "r"
    packed = served.infer(long, Accept_Encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(packed.body)) == answer.json


def test_json_is_long_whatever_a_header_says_of_its_end(
    served: ServedHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def read(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        raise HttpError(400, "read")

    monkeypatch.setattr(application, "generate_request", read)
    body = b" " * 100_000
    assert (
        served.infer(body, path="/v2/models/m/generate", Inference_Header_Content_Length="1").error == "read"
    )
    assert threads[0].startswith("http-json")


def test_a_response_that_is_found_too_large_after_the_run_is_no_overload(served: ServedHttp) -> None:
    client = served.client()
    client.send(post(INFER, request("r")))
    served.service.await_received(1)
    served.service.fail("r", ResponseTooLargeError("the response has 9 bytes"))
    answer = client.read()
    assert (answer.status, answer.error) == (400, "the response has 9 bytes")


def test_an_error_shows_a_value_as_json(served: ServedHttp) -> None:
    for value, shown in (("5", '"5"'), (True, "true"), ([5], "a list")):
        answer = served.ask(post("/v2/systemsharedmemory/region/r/register", {"byte_size": value}))
        assert answer.error == f"'byte_size' is {shown}; it must be an integer of at least 0"


def test_calls_and_connections_are_limited(serve: Serve) -> None:
    served = serve(max_calls=1, max_connections=2)
    first, second = served.client(), served.client()
    first.send(post(INFER, request("r")))
    served.service.await_received(1)
    second.send(post(INFER, request("s")))
    answer = second.read()
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    # The one that is idle makes room for another.
    third = served.client()
    assert second.ended()
    third.send(get("/v2/health/live"))
    assert third.read().status == 200
    served.service.answer("r")
    assert first.read().status == 200


def test_a_connection_is_refused_while_all_are_busy(serve: Serve) -> None:
    served = serve(max_connections=1)
    first = served.client()
    first.send(post(INFER, request("r")))
    served.service.await_received(1)
    second = served.client().read()
    assert (second.status, "too many connections" in second.error) == (503, True)
    served.service.answer("r")
    assert first.read().status == 200


def test_a_draining_server_answers_a_client_that_has_just_connected(
    served: ServedHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_NEW_SECONDS", PATIENCE)
    client = served.client()
    until(lambda: served.server.connections == 1)
    served.server.begin_drain()
    until(lambda: served.server.draining)
    client.send(get("/v2/health/live"))
    assert client.read().headers["connection"] == "close"
    assert client.ended()
