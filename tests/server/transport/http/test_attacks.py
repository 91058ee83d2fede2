"""Clients that try to stop the server, to fill its memory, to mix up answers, or to use a browser of somebody else."""

from __future__ import annotations

import resource
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polling import until
from support.server.certificates import Issued
from support.server.http_rig import RawClient, ServedHttp, get, post
from support.server.rig import PATIENCE
from support.server.scripted_service import success

from tensorferry.server.inference.reply import BuiltReply
from tensorferry.server.transport.http import connection as connections
from tensorferry.server.transport.http.errors import HttpError

Serve = Callable[..., ServedHttp]
INFER, LOAD = "/v2/models/m/infer", "/v2/repository/models/m/load"
LARGE = 8 << 20


def request(request_id: str, **headers: str) -> bytes:
    body = {"id": request_id, "inputs": [], "parameters": {"binary_data_output": True}}
    return post(INFER, body, **headers)


def with_large_answers(serve: Serve, **options: Any) -> ServedHttp:
    served = serve(**options)
    served.service.answer_at_once = lambda request_id: success(request_id, LARGE)
    return served


def test_empty_lines_before_a_request_cost_nothing(serve: Serve) -> None:
    client = serve().client()
    # Removed one by one they took 2 s for each 256 KiB.
    client.send(b"\r\n" * (4 << 20) + get("/v2/health/live"))
    assert client.read().json == {"live": True}


def test_an_error_that_is_kept_keeps_no_request(serve: Serve) -> None:
    served = serve()
    block = post("/unknown", b"")
    assert served.ask(block).status == served.ask(block).status == 404
    kept = served.server.heads.get(block).target
    assert isinstance(kept, HttpError)
    assert kept.__traceback__ is None


def test_the_body_of_get_is_not_unpacked(serve: Serve) -> None:
    bomb = post("/v2/health/live", b"bomb", Content_Encoding="gzip").replace(b"POST", b"GET")
    assert serve().ask(bomb).status == 200


def test_only_models_may_be_large(serve: Serve) -> None:
    served = serve()
    large = {"x": "y" * (1 << 20)}
    assert served.ask(post("/v2/repository/index", large)).status == 413
    # Read, and then refused because this server has no such method.
    assert served.ask(post(LOAD, large)).status == 501
    # The body is not read.
    for path, status in (("/v2/health/live", 413), ("/unknown", 404)):
        client = served.client()
        client.send(get(path, Content_Length=str(LARGE)))
        assert client.read().status == status
        assert client.ended()


def test_half_a_surrogate_pair_is_an_error_of_the_client(serve: Serve) -> None:
    for path, body in (
        ("/v2/trace/setting", {"trace_level": "\ud800"}),
        (INFER, {"id": "\ud800", "inputs": []}),
        (INFER, {"inputs": [{"name": "\ud800", "datatype": "FP32", "shape": [0], "data": []}]}),
        ("/v1/embeddings", {"input": "a", "model": "\ud800"}),
    ):
        answer = serve().ask(post(path, body))
        assert (answer.status, "surrogate" in answer.error) == (400, True)


def test_an_error_quotes_only_a_part_of_a_long_text(serve: Serve) -> None:
    answer = serve().infer({"inputs": [{"name": "x" * LARGE, "datatype": "INT64"}]})
    assert (answer.status, len(answer.body) < 20_000) == (400, True)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (LOAD, {"Origin": "http://evil.example"}, 403),
        (LOAD, {"Sec_Fetch_Site": "same-origin"}, 403),
        ("/v2/systemsharedmemory/region/r/register", {"Origin": "null"}, 403),
        (INFER, {"Sec_Fetch_Site": "cross-site"}, 403),
        (INFER, {"Origin": "http://localhost"}, 200),
        (LOAD, {}, 501),
        # DNS rebinding.
        (INFER, {"Host": "evil.example:8000"}, 403),
        (INFER, {"Host": "[::1]:8000"}, 200),
        # A second form of the path, which a proxy may not know.
        ("/v2/%72epository/models/m/load", {}, 404),
        ("/v2/models/m%2Finfer", {}, 405),
    ],
)
def test_web_pages_cannot_use_a_browser_s_access(
    serve: Serve, path: str, headers: dict[str, str], status: int
) -> None:
    served = serve()
    served.service.answer_at_once = success
    data = post(path, {"inputs": []}, **headers)
    if "Host" in headers:
        data = data.replace(b"Host: localhost\r\n", b"")
    assert served.ask(data).status == status


def test_a_server_with_tokens_takes_any_host_and_keeps_no_body_without_one(
    serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text(f"client infer sha256:{'0' * 64}\n")
    (tmp_path / "tokens").chmod(0o600)
    served = serve(auth_tokens=tmp_path / "tokens")
    assert served.ask(get("/v2/health/live").replace(b"localhost", b"proxy.example")).status == 200
    for fields in (b"Content-Length: 1000\r\nExpect: 100-continue", b"Transfer-Encoding: chunked"):
        client = served.client()
        client.send(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\n" + fields + b"\r\n\r\n")
        assert client.read().status == 401
        assert client.ended()


def over_tls(served: ServedHttp, issued: Issued) -> RawClient:
    context = ssl.create_default_context(cafile=issued.ca)
    return RawClient(served.port, lambda bare: context.wrap_socket(bare, server_hostname="localhost"))


def test_pipelined_requests_over_tls_are_all_answered(serve: Serve, tmp_path: Path) -> None:
    issued = Issued.in_folder(tmp_path)
    served = serve(tls_certificate=issued.flags[1], tls_key=issued.flags[3])
    client, sent = over_tls(served, issued), 0
    # Together and alone, because asyncio paused every second writing.
    for together in (1, 3, 2, 3):
        numbers = range(sent, sent + together)
        client.send(b"".join(request(f"r{number}") for number in numbers))
        for number in numbers:
            served.service.await_received(number + 1)
            served.service.answer(f"r{number}")
            assert client.read().json["id"] == f"r{number}"
        sent += together
    client.close()


def test_a_connection_over_tls_that_is_closed_twice_makes_room(serve: Serve, tmp_path: Path) -> None:
    issued = Issued.in_folder(tmp_path)
    served = serve(max_connections=1, tls_certificate=issued.flags[1], tls_key=issued.flags[3])
    first, live = over_tls(served, issued), get("/v2/health/live")
    first.send(live)
    assert first.read().status == 200
    # It is open until the client, which does not read, agrees to its end.
    for _ in range(2):
        served.server.on_loop(served.server._end_idle)
    second = over_tls(served, issued)
    second.send(live)
    assert second.read().status == 200
    for client in (first, second):
        client.close()


def test_a_body_over_tls_is_read_after_its_request_was_refused(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_DISCARD_SECONDS", PATIENCE)
    issued = Issued.in_folder(tmp_path)
    served = serve(tls_certificate=issued.flags[1], tls_key=issued.flags[3])
    client, other = over_tls(served, issued), over_tls(served, issued)
    client.send(get("/unknown", Content_Length=str(LARGE)))
    assert client.read().status == 404
    client.send(bytes(100_000))
    # What came first is read first.
    other.send(get("/v2/health/live"))
    assert other.read().status == 200
    assert served.server.connections == 2
    for each in (client, other):
        each.close()


@pytest.mark.parametrize("tls", [False, True])
def test_unread_answers_are_counted_also_at_the_end_of_a_connection(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, tls: bool
) -> None:
    issued = Issued.in_folder(tmp_path)
    files = {"tls_certificate": issued.flags[1], "tls_key": issued.flags[3]} if tls else {}
    served = with_large_answers(serve, **files)
    for reads in (True, False):
        client = over_tls(served, issued) if tls else served.client()
        client.send(request("r", Connection="close"))
        until(lambda: served.server.unread.total > 1 << 20)
        if reads:
            assert len(client.read().body) > LARGE
            assert client.ended()
        client.close()
        until(lambda: served.server.unread.total == served.server.connections == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_never_reads_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_IDLE_SECONDS", 0.1)
    monkeypatch.setattr("tensorferry.server.transport.http.server._SWEEP_SECONDS", 0.01)
    served = with_large_answers(serve)
    served.client().send(request("r"))
    until(lambda: served.server.unread.total > 0)
    until(lambda: served.server.connections == 0)


def test_an_exception_while_one_request_is_answered_leaves_the_others_alone(serve: Serve) -> None:
    class Broken:
        def sent(self) -> None:
            raise RuntimeError

    served = serve()
    first, second, third = (served.client() for _ in range(3))
    for number, client in enumerate((first, second, third)):
        client.send(request(f"r{number}"))
    served.service.await_received(3)
    go_on = threading.Event()

    def wait() -> None:
        go_on.wait(PATIENCE)

    served.server.on_loop(wait)
    broken: Any = Broken()
    served.service.answer_with("r0", BuiltReply("r0", lambda: success("r0").pieces(), trace=broken))
    served.service.fail("r1", SystemExit())
    served.service.answer("r2")
    go_on.set()
    assert [first.read().status, second.read().status, third.read().status] == [200, 500, 200]


def test_http_leaves_half_of_the_files_to_others(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5, 5))
    served = serve()
    clients = [served.client() for _ in range(3)]
    assert clients[0].ended()
    clients[2].send(get("/v2/health/live"))
    assert clients[2].read().status == 200
