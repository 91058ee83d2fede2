"""Requests as browsers send them for a page of another site, to a server with tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support.processes.server import ServerProcess, running
from support.server.tokens import line

PAGE = "https://page.example"
INFER = "/v2/models/echo/infer"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}


@pytest.fixture(scope="module")
def server(
    transport: str, echo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    tokens = tmp_path_factory.mktemp("cors") / "tokens"
    tokens.write_text(line("page", "infer", "the-token"))
    options = ("--auth-tokens", tokens, "--http-port", "0", "--http-cors-origins", PAGE)
    with running(echo_model, *options, transport=transport) as server:
        yield server


def ask(
    server: ServerProcess, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    """The status, the headers and the body of an answer. Underscores in the names of headers stand for hyphens."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(server.ready["http"] + path, data, given, method=method), timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def test_a_page_asks_and_then_infers(server: ServerProcess) -> None:
    asked = {
        "Origin": PAGE,
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization,content-type",
    }
    status, headers, _ = ask(server, "OPTIONS", INFER, **asked)
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, PAGE)
    assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    token = {"Authorization": "Bearer the-token"}
    page = {"Origin": PAGE, "Sec_Fetch_Site": "cross-site"}
    status, headers, body = ask(server, "POST", INFER, BODY, **page, **token)
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, PAGE)
    assert json.loads(body)["outputs"][0]["data"] == [1, 2, 3]
    status, headers, _ = ask(server, "POST", INFER, BODY, **page)
    assert (status, headers["Access-Control-Allow-Origin"]) == (401, PAGE)
    # Only the inference was counted.
    _, _, body = ask(server, "GET", "/v2/models/echo/stats", **token)
    assert json.loads(body)["model_stats"][0]["inference_stats"]["success"]["count"] == 1


def test_another_page_may_not(server: ServerProcess) -> None:
    page = {"Origin": "https://other.example", "Sec_Fetch_Site": "cross-site"}
    for method, status in (("OPTIONS", 405), ("POST", 403)):
        asked = {"Access_Control_Request_Method": "POST"} if method == "OPTIONS" else {}
        given, headers, _ = ask(server, method, INFER, **page, **asked)
        assert (given, "Access-Control-Allow-Origin" in headers) == (status, False)
