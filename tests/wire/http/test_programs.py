"""Clients without a library for the protocol: Go's net/http, Node's fetch and curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.processes import models
from support.processes.server import ServerProcess, running
from support.wire.programs import CLIENTS, CURL, needs

GO = CLIENTS / "go" / "http_client"
NODE = Path(shutil.which("node") or "node")
PROGRAMS = {"go": [GO], "node": [NODE, Path(__file__).parent / "client.mjs"]}
REQUEST = '{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1.5,-2]}]}'


@pytest.fixture(scope="module")
def server(transport: str, model_dir: Path) -> Iterator[ServerProcess]:
    with running(*models.echoes(model_dir, "FP32"), "--http-port", "0", transport=transport) as server:
        yield server


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(PROGRAMS[name][0])) for name in PROGRAMS])
def test_binary_and_json_large_and_at_once_and_an_error(name: str, server: ServerProcess) -> None:
    command = [*map(str, PROGRAMS[name]), server.ready["http"]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    status, error = report.pop("error")
    assert status == 404
    assert error.startswith("Request for unknown model: 'nobody'")
    # fetch opens a second one, because it begins a call before the one before has ended.
    assert report.pop("connections") <= 2
    few = [1.5, -2.0]
    assert report == {
        "binary": few,
        "json": few,
        "large": True,
        "long": 3000,
        "concurrent": [*range(50)],
    }


@dataclass(frozen=True)
class Answered:
    """The lines of the answer's heads, and its body."""

    lines: list[str]
    body: bytes

    @property
    def json_length(self) -> int:
        (line,) = (line for line in self.lines if line.startswith("Inference-Header-Content-Length: "))
        return int(line.partition(": ")[2])


Curl = Callable[..., Answered]


@pytest.fixture(params=[pytest.param("", marks=needs(CURL))])
def curl(server: ServerProcess) -> Curl:
    def call(*arguments: str, path: str = "/v2/models/echo-FP32/infer") -> Answered:
        command = [str(CURL), "--silent", "--verbose", "--max-time", "60", *arguments]
        ended = subprocess.run([*command, server.ready["http"] + path], capture_output=True, timeout=100)
        assert ended.returncode == 0, ended.stderr
        lines = ended.stderr.decode().splitlines()
        return Answered([line[2:] for line in lines if line.startswith("< ")], ended.stdout)

    return call


OLD = ("--http1.0", "-H", "Connection: keep-alive", "-d")


# With -d, curl says that the body is a form.
@pytest.mark.parametrize(
    "options", [("-d",), ("--json",), OLD[:1] + OLD[3:], OLD, ("--http2", "-d")], ids=str
)
def test_curl_sends_json(curl: Curl, options: tuple[str, ...]) -> None:
    answered = curl(*options, REQUEST)
    assert answered.lines[0] == "HTTP/1.1 200 OK"
    assert "Content-Type: application/json" in answered.lines
    kept = "Connection: keep-alive" if options == OLD else "Connection: close"
    assert (kept in answered.lines) is ("--http1.0" in options)
    assert json.loads(answered.body) == {
        "model_name": "echo-FP32",
        "model_version": "1",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2.0]}],
    }


def test_the_path_of_sagemaker_is_for_the_only_model(curl: Curl) -> None:
    assert json.loads(curl("-d", REQUEST, path="/invocations").body)["model_name"] == "echo-FP32"


@pytest.mark.parametrize("options", [(), ("-H", "Transfer-Encoding: chunked")], ids=["length", "chunked"])
@pytest.mark.parametrize("with_json", [True, False])
def test_curl_sends_binary_data_above_a_mebibyte(
    curl: Curl, tmp_path: Path, with_json: bool, options: tuple[str, ...]
) -> None:
    """So it waits for 100 Continue. Without JSON, the body is the only input."""
    count, file = 400_000, tmp_path / "body"
    raw = np.arange(count, dtype=np.float32).tobytes()
    given = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, count],
        "parameters": {"binary_data_size": len(raw)},
    }
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    head = head if with_json else b""
    file.write_bytes(head + raw)
    length = ("-H", f"Inference-Header-Content-Length: {len(head)}")
    answered = curl(*options, *length, "--data-binary", f"@{file}")
    assert [line for line in answered.lines if line.startswith("HTTP/")] == [
        "HTTP/1.1 100 Continue",
        "HTTP/1.1 200 OK",
    ]
    assert "Content-Type: application/octet-stream" in answered.lines
    assert answered.body[answered.json_length :] == raw


def test_curl_asks_for_compressed_answers(curl: Curl) -> None:
    long = REQUEST.replace("[1,2]", "[1,3000]").replace("[1.5,-2]", str([0.5] * 3000))
    answered = curl("--compressed", "-d", long)
    assert "Content-Encoding: gzip" in answered.lines
    assert json.loads(answered.body)["outputs"][0]["data"] == [0.5] * 3000


PATHS = "GET /v2/models lists the models, and POST /v2/models/NAME/infer runs one"


@pytest.mark.parametrize(
    ("options", "path", "status", "body"),
    [
        ((), "/v2/health/live", 200, {"live": True}),
        ((), "/v2/health/ready", 200, {"ready": True}),
        ((), "/ping", 200, {"ready": True}),
        ((), "/v2/models", 200, {"models": ["echo-FP32"]}),
        ((), "/v2/models/echo-FP32/versions/1/ready?a=b", 200, {"name": "echo-FP32", "ready": True}),
        ((), "/v2/models/nobody/ready", 404, None),
        (
            (),
            "/v2/models/echo-FP32/versions/one",
            404,
            {"error": f"there is no path /v2/models/echo-FP32/versions/one; {PATHS}"},
        ),
        (
            ("-X", "DELETE"),
            "/v2/models/echo-FP32",
            405,
            {"error": f"/v2/models/echo-FP32 takes GET, not DELETE; {PATHS}"},
        ),
        (("-X", "POST"), "/v2/repository/index", 200, None),
        (("-d", '{"ready":true}'), "/v2/repository/index", 200, None),
        (("-d", "{"), "/v2/models/echo-FP32/infer", 400, None),
        (("-d", REQUEST[:-2] + "{}]}"), "/v2/models/echo-FP32/infer", 400, None),
        (("--head",), "/v2/health/ready", 200, ""),
    ],
)
def test_curl_reads_each_status(
    curl: Curl, options: tuple[str, ...], path: str, status: int, body: object
) -> None:
    answered = curl(*options, path=path)
    assert answered.lines[0].startswith(f"HTTP/1.1 {status} ")
    assert "Content-Type: application/json" in answered.lines
    if body == "":
        return
    found = json.loads(answered.body)
    assert ("error" in found) is (status != 200)
    assert body is None or found == body
