"""Pages of other sites: which of them may call the server, and what browsers are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.server.http_rig import Answer, ServedHttp, get, post
from support.server.scripted_service import success

from tensorferry.server.transport.call_admission import CallAdmission
from tensorferry.server.transport.http import connection as connections
from tensorferry.server.transport.http.heads import Head

Serve = Callable[..., ServedHttp]
PAGE, OTHER = "https://page.example", "https://other.example"
INFER, LOAD = "/v2/models/m/infer", "/v2/repository/models/m/load"


@pytest.fixture(name="serve")
def serve_pages(serve: Serve) -> Serve:
    """Start a server whose HTTP port the pages of PAGE may call; another option replaces that."""

    def start(**options: Any) -> ServedHttp:
        served = serve(**{"http_cors_origins": (PAGE,), **options})
        served.service.answer_at_once = success
        return served

    return start


def preflight(path: str, origin: str = PAGE, **headers: str) -> bytes:
    asked = get(path, Origin=origin, Access_Control_Request_Method="POST", **headers)
    return asked.replace(b"GET", b"OPTIONS")


def cors_of(answer: Answer) -> dict[str, str]:
    """The headers of an answer that concern other sites."""
    return {
        name: value
        for name, value in answer.headers.items()
        if name == "vary" or name.startswith("access-control-")
    }


@pytest.mark.parametrize("path", [INFER, LOAD, "/v1/embeddings", "/unknown", "/"])
def test_a_preflight_request_is_answered_for_every_path(serve: Serve, path: str) -> None:
    answer = serve().ask(preflight(path, Access_Control_Request_Headers="authorization,content-type"))
    assert (answer.status, answer.body) == (200, b"")
    assert cors_of(answer) == {
        "access-control-allow-origin": PAGE,
        "vary": "Origin",
        "access-control-allow-methods": "GET, HEAD, POST",
        "access-control-allow-headers": "authorization,content-type",
        "access-control-max-age": "7200",
    }


def test_a_preflight_request_needs_no_token_and_is_no_call(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens").write_text(f"client infer sha256:{'0' * 64}\n")
    (tmp_path / "tokens").chmod(0o600)
    served = serve(auth_tokens=tmp_path / "tokens")
    with monkeypatch.context() as patch:
        patch.setattr(CallAdmission, "admit_unary", lambda *arguments: pytest.fail("counted as a call"))
        assert served.ask(preflight(INFER)).status == 200
    refused = served.ask(post(INFER, {"inputs": []}, Origin=PAGE))
    assert (refused.status, cors_of(refused)["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post(INFER, {"inputs": []}, Origin=PAGE, Sec_Fetch_Site="cross-site"), 200),
        (get("/v2/health/live", Origin=PAGE), 200),
        (get("/unknown", Origin=PAGE), 404),
        (post(INFER, b"{", Origin=PAGE), 400),
        # Refused before the body has come.
        (post(INFER, b"", Origin=PAGE).replace(b"Length: 0", b"Length: 99999999999"), 413),
        (post("/unknown", b"", Origin=PAGE).replace(b"Length: 0", b"Length: 10"), 404),
    ],
)
def test_an_allowed_page_can_read_answers_and_errors(serve: Serve, data: bytes, status: int) -> None:
    answer = serve().ask(data)
    assert answer.status == status
    assert cors_of(answer) == {
        "access-control-allow-origin": PAGE,
        "vary": "Origin",
        "access-control-expose-headers": (
            "Inference-Header-Content-Length, Retry-After, retry-after-ms, x-should-retry"
        ),
    }


def test_an_allowed_page_can_read_that_its_request_came_too_slowly(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_ARRIVAL_SECONDS", 0.0)
    monkeypatch.setattr(connections, "_LEAST_BYTES_PER_SECOND", 1e9)
    monkeypatch.setattr("tensorferry.server.transport.http.server._SWEEP_SECONDS", 0.01)
    answer = serve().ask(post("/v1/embeddings", {"input": "a"}, Origin=PAGE)[:-1])
    assert (answer.status, cors_of(answer)["access-control-allow-origin"]) == (408, PAGE)
    # In the form of its path.
    assert answer.json["error"]["type"] == "invalid_request_error"


def test_a_head_response_has_the_headers_and_no_body(serve: Serve) -> None:
    client = serve().client()
    client.send(get("/v2/health/live", Origin=PAGE).replace(b"GET", b"HEAD"))
    answer = client.read("HEAD")
    assert cors_of(answer)["access-control-allow-origin"] == PAGE
    client.send(get("/v2/health/live"))
    assert client.read().json == {"live": True}


@pytest.mark.parametrize("origin", [OTHER, "null", "https://page.example.evil.example", f"{PAGE}, {OTHER}"])
def test_a_page_of_another_origin_gets_no_permission(serve: Serve, origin: str) -> None:
    served = serve()
    data = post(INFER, {"inputs": []}, Origin=origin, Sec_Fetch_Site="cross-site")
    for asked, status in (
        (preflight(INFER, origin), 405),
        (data, 403),
        (get("/v2/health/live", Origin=origin), 200),
    ):
        answer = served.ask(asked)
        # A cache must not give this answer to the allowed page.
        assert (answer.status, cors_of(answer)) == (status, {"vary": "Origin"})


def test_with_an_asterisk_every_page_may_call(serve: Serve) -> None:
    served = serve(http_cors_origins=("*",))
    answer = served.ask(post(INFER, {"inputs": []}, Origin=OTHER, Sec_Fetch_Site="cross-site"))
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
    # The answer is the same for all, so caches need not tell them apart.
    assert "vary" not in answer.headers
    assert cors_of(served.ask(get("/v2/health/live"))) == {}


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
def test_no_page_may_change_the_server(serve: Serve, origins: tuple[str, ...]) -> None:
    answer = serve(http_cors_origins=origins).ask(post(LOAD, {}, Origin=PAGE, Sec_Fetch_Site="cross-site"))
    assert (answer.status, "web pages cannot call this" in answer.error) == (403, True)
    # So that the page can show why.
    assert answer.headers["access-control-allow-origin"] in (PAGE, "*")


def test_a_name_that_resolves_to_this_machine_is_still_refused(serve: Serve) -> None:
    data = post(INFER, {"inputs": []}, Origin=PAGE).replace(b"Host: localhost", b"Host: evil.example")
    assert serve(http_cors_origins=("*",)).ask(data).status == 403


def test_without_the_option_responses_are_sent_as_they_were_made(serve: Serve) -> None:
    served = serve(http_cors_origins=())
    for data, status in ((preflight(INFER), 405), (get("/v2/health/live", Origin=PAGE), 200)):
        answer = served.ask(data)
        assert (answer.status, cors_of(answer)) == (status, {})
    head: Head = served.server.heads.get(get("/v2/health/live", Origin=PAGE))
    assert head.is_plain
