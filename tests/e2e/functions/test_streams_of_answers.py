"""Functions that yield, on a real server: each item is an answer. A function stops when nobody reads."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polling import PATIENCE, until
from support.processes.server import ServerProcess, running

from tensorferry.client import (
    DeadlineExceeded,
    InferenceClient,
    InferenceError,
    Internal,
    Unimplemented,
)

_APP = """
import asyncio
import os
import time
from pathlib import Path

import numpy as np

from tensorferry.serving import FP32, INT32, STRING, InvalidInput, infer, model, submit

DECLARED = {
    "inputs": {"notes": STRING[1], "count": INT32[1], "size": INT32[1]},
    "outputs": {"number": INT32[1], "values": FP32[-1]},
    "streams": True,
    "example": {"notes": ["/dev/null"], "count": [1], "size": [1]},
}


def items(notes, count, size):
    \"\"\"Note each item, then give it. Before the second one, wait for a file.\"\"\"
    go = Path(f"{notes[0]}.go")
    try:
        for number in range(abs(int(count[0]))):
            while number == 1 and not go.exists():
                yield None
            if number == 3 and count[0] < 0:
                raise ValueError("three")
            with open(notes[0], "a") as file:
                print(number, file=file)
            yield [number], np.full(size, number, np.float32)
    finally:
        with open(notes[0], "a") as file:
            print("closed", file=file)


def plain(notes, count, size):
    for item in items(notes, count, size):
        if item is None:
            time.sleep(0.001)
        else:
            yield item


@model(**DECLARED, name="coroutine", workers=2)
async def coroutine(notes, count, size):
    source = items(notes, count, size)
    try:
        for item in source:
            if item is None:
                await asyncio.sleep(0.001)
            else:
                yield item
    finally:
        source.close()


in_thread = model(**DECLARED, name="plain", workers=2)(plain)
in_process = model(**DECLARED, name="in_process", processes=2)(plain)


@model(inputs={"x": INT32[1]}, outputs={"y": INT32[1]}, streams=True, processes=1)
def dying(x):
    yield x
    if x[0] == 7:
        os._exit(3)
    yield infer("twice", x=x)["y"]


def ahead(x):
    future = submit("twice", x=x)
    yield x
    yield future.result()["y"]


AHEAD = {"inputs": {"x": INT32[1]}, "outputs": {"y": INT32[1]}, "streams": True}
ahead_in_thread = model(**AHEAD)(ahead)
ahead_in_process = model(**AHEAD, name="ahead_in_process", processes=1)(ahead)


@model(inputs={"x": INT32[1]}, outputs={"y": INT32[1]}, max_batch_size=0)
def twice(x):
    return x + x


@model(inputs={"x": INT32[1]}, outputs={"y": INT32[1]}, streams=True)
def wrong(x):
    yield x
    yield np.zeros(3, np.float32)


@model(inputs={"x": INT32[1]}, outputs={"y": INT32[1]}, streams=True)
def returns(x):
    return iter([x]) if x[0] < 5 else x


@model(inputs={"x": INT32[1]}, outputs={"number": INT32[1]}, max_batch_size=0)
def calls_it(x):
    return infer("plain", notes=["/dev/null"], count=x, size=x)["number"]
"""
KINDS = ("plain", "coroutine", "in_process")


@pytest.fixture(scope="module")
def server(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("streams") / "app.py"
    path.write_text(_APP)
    with running(path, "--http-port", "0", transport=transport, logs_errors=True) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[InferenceClient]:
    with InferenceClient(server.address) as client:
        yield client


def request(notes: Path, count: int, size: int = 1) -> Mapping[str, Any]:
    return {
        "notes": np.array([str(notes)], object),
        "count": np.array([count], np.int32),
        "size": np.array([size], np.int32),
    }


def go(notes: Path) -> Path:
    Path(f"{notes}.go").touch()
    return notes


def lines(notes: Path) -> list[str]:
    return notes.read_text().split() if notes.exists() else []


def number(result: Any) -> int:
    return int(result["number"][0])


def x(value: int) -> Mapping[str, Any]:
    return {"x": np.array([value], np.int32)}


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_arrives_before_the_next_is_made(
    kind: str, client: InferenceClient, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    results = client.stream(kind, [request(notes, 100)], timeout=PATIENCE)
    assert number(next(results)) == 0
    assert lines(notes) == ["0"]
    go(notes)
    assert [number(result) for result in results] == [*range(1, 100)]
    assert lines(notes) == [*map(str, range(100)), "closed"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_answers_are_made_that_the_client_does_not_read(
    kind: str, client: InferenceClient, tmp_path: Path
) -> None:
    notes = go(tmp_path / "notes")
    results = client.stream(kind, [request(notes, 10_000, 1 << 18)], timeout=PATIENCE)
    assert number(next(results)) == 0
    for _ in range(50):
        assert client.is_ready()
        # Each is 1 MiB. gRPC takes some of them before the client asks for them.
        assert len(lines(notes)) < 64
    results.close()
    until(lambda: lines(notes)[-1] == "closed")


def test_a_generator_that_waits_ends_when_its_client_leaves(client: InferenceClient, tmp_path: Path) -> None:
    """An asynchronous one: others go on until they yield."""
    results = client.stream("coroutine", [request(tmp_path / "notes", 2)], timeout=PATIENCE)
    next(results)
    results.close()
    until(lambda: lines(tmp_path / "notes")[-1] == "closed")


def test_the_deadline_ends_a_generator(client: InferenceClient, tmp_path: Path) -> None:
    results = client.stream("coroutine", [request(tmp_path / "notes", 2)], timeout=0.2)
    with pytest.raises(DeadlineExceeded):
        list(results)
    until(lambda: lines(tmp_path / "notes")[-1:] in (["closed"], []))


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_ends_one_request_of_a_stream(
    kind: str, client: InferenceClient, tmp_path: Path, server: ServerProcess
) -> None:
    requests = [request(go(tmp_path / str(at)), count) for at, count in enumerate((2, -9, 2))]
    found: dict[str, list[Any]] = {}
    for result in client.stream(kind, requests, on_error="yield", timeout=PATIENCE):
        if isinstance(result, InferenceError):
            found.setdefault(result.request_id or "", []).append(type(result))
        else:
            found.setdefault(result.id, []).append(number(result))
    assert [*found.values()].count([0, 1]) == 2
    assert [0, 1, 2, Internal] in found.values()
    until(lambda: any("raised ValueError: three" in line for line in server.log))


def test_requests_of_an_ordered_stream_do_not_wait_for_each_other(
    client: InferenceClient, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", go(tmp_path / "second")
    requests = [request(first, 2), request(second, 3)]
    results = client.stream("plain", requests, ordered=True, timeout=PATIENCE)
    by_id: dict[str, list[int]] = {}
    for _ in range(4):
        result = next(results)
        by_id.setdefault(result.id, []).append(number(result))
    assert sorted(by_id.values()) == [[0], [0, 1, 2]]
    go(first)
    assert [number(result) for result in results] == [1]


def test_more_requests_than_may_be_in_flight(client: InferenceClient, tmp_path: Path) -> None:
    notes = go(tmp_path / "notes")
    requests = [request(notes, 2)] * 20
    found = [number(each) for each in client.stream("plain", requests, max_in_flight=3, timeout=PATIENCE)]
    assert sorted(found) == [0] * 20 + [1] * 20


def test_a_process_that_ends_fails_its_request_only(client: InferenceClient) -> None:
    results = client.stream("dying", [x(7)], timeout=PATIENCE)
    assert next(results)["y"] == [7]
    with pytest.raises(Internal):
        next(results)
    assert [int(each["y"][0]) for each in client.stream("dying", [x(8)], timeout=PATIENCE)] == [8, 16]


@pytest.mark.parametrize("model", ["ahead", "ahead_in_process"])
def test_a_call_of_another_model_goes_on_while_an_answer_is_given(
    model: str, client: InferenceClient
) -> None:
    assert [int(each["y"][0]) for each in client.stream(model, [x(8)], timeout=PATIENCE)] == [8, 16]


def test_wrong_answers_are_errors(client: InferenceClient) -> None:
    results = client.stream("wrong", [x(1)], timeout=PATIENCE)
    assert next(results)["y"] == [1]
    with pytest.raises(Internal, match=r"output 'y' has dtype float32, and is declared as INT32"):
        next(results)
    assert [int(each["y"][0]) for each in client.stream("returns", [x(1)], timeout=PATIENCE)] == [1]
    with pytest.raises(Internal):
        list(client.stream("returns", [x(5)], timeout=PATIENCE))


def test_calls_that_have_one_answer_are_refused(client: InferenceClient) -> None:
    with pytest.raises(Unimplemented, match=r"answers in streams, .* call ModelStreamInfer, or over HTTP"):
        client.infer("dying", x(1))
    with pytest.raises(
        InferenceError, match="model 'plain' answers in streams, so a function cannot call it"
    ):
        client.infer("calls_it", x(1))


def test_clients_see_that_a_model_answers_in_streams(client: InferenceClient) -> None:
    assert client.metadata("plain").properties["streams"] == "true"
    assert "streams" not in client.metadata("twice").properties
    assert client.metadata("plain").properties["batching"] == "unbatched (it answers in streams)"


# HTTP.


@contextlib.contextmanager
def events(
    server: ServerProcess, model: str, body: Mapping[str, Any], method: str = "generate_stream"
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(
        server.ready["http"].removeprefix("http://").rstrip("/"), timeout=PATIENCE
    )
    connection.request("POST", f"/v2/models/{model}/{method}", json.dumps(body))
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def event(response: http.client.HTTPResponse) -> Any:
    line, empty = response.readline(), response.readline()
    assert empty in (b"\n", b"")
    return json.loads(line.removeprefix(b"data: ")) if line else None


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_events_of_http(kind: str, server: ServerProcess, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with events(server, kind, {"id": "a", "notes": str(notes), "count": -5, "size": [2]}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        head = {"model_name": kind, "model_version": "1", "id": "a"}
        assert event(response) == {**head, "number": 0, "values": [0, 0]}
        assert lines(notes) == ["0"]
        go(notes)
        assert [event(response)["number"] for _ in range(2)] == [1, 2]
        assert "failed on this request" in event(response)["error"]
        assert event(response) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_that_only_the_server_knows_ends_a_request_in_time(
    kind: str, server: ServerProcess, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    body = {"notes": str(notes), "count": 2, "size": 1, "timeout": 200_000}
    with events(server, kind, body) as response:
        assert b"the deadline passed" in response.read()
    if kind != "coroutine":
        # Others end at their next `yield`.
        go(notes)
    until(lambda: lines(notes)[-1:] in (["closed"], []))


def test_an_http_client_that_leaves_ends_the_generator(server: ServerProcess, tmp_path: Path) -> None:
    notes = go(tmp_path / "notes")
    with events(server, "plain", {"notes": str(notes), "count": 100_000, "size": 1 << 15}) as response:
        assert event(response)["number"] == 0
    until(lambda: lines(notes)[-1] == "closed")
    assert len(lines(notes)) < 100_000


@pytest.mark.parametrize(
    ("model", "body", "status", "expected"),
    [
        ("plain", {"count": "many"}, 400, "'count'"),
        ("plain", {"id": 3}, 400, "'id' is 3; it must be a string"),
        ("nobody", {}, 404, "unknown model: 'nobody'"),
        ("plain", [], 400, "JSON object"),
        ("plain", {"id": "\ud800"}, 400, "surrogate"),
        ("plain", {"x": "\ud800"}, 400, "surrogate"),
    ],
)
def test_an_error_before_the_first_event_has_a_status(
    server: ServerProcess, model: str, body: Any, status: int, expected: str
) -> None:
    with events(server, model, body) as response:
        assert response.status == status
        assert expected in json.load(response)["error"]


def test_a_model_with_one_answer_gives_one_event(server: ServerProcess) -> None:
    head = {"model_name": "twice", "model_version": "1"}
    for method, parse in (("generate_stream", event), ("generate", json.load)):
        with events(server, "twice", {"x": 4, "temperature": 0.5}, method) as response:
            assert parse(response) == {**head, "y": 8}
            assert response.read() == b""


def test_the_client_of_events_may_ask_for_an_empty_last_one(server: ServerProcess, tmp_path: Path) -> None:
    body = {
        "notes": str(go(tmp_path / "notes")),
        "count": 2,
        "size": 1,
        "triton_enable_empty_final_response": True,
    }
    with events(server, "plain", body) as response:
        assert [event(response).get("number") for _ in range(3)] == [0, 1, None]
        assert response.read() == b""


def test_no_answers_are_an_empty_stream(server: ServerProcess, tmp_path: Path) -> None:
    with events(server, "plain", {"notes": str(tmp_path / "notes"), "count": 0, "size": 1}) as response:
        assert response.status == 200
        assert response.read() == b""


def test_the_example_writes_text(transport: str) -> None:
    app = Path(__file__).parents[3] / "examples" / "generator" / "app.py"
    inputs = {"prompt": ["The function"], "words": [20]}
    with running(app, transport=transport) as server, InferenceClient(server.address) as client:
        pieces, again = (
            [str(each["piece"][0]) for each in client.stream("Writer", [inputs], timeout=PATIENCE)]
            for _ in range(2)
        )
    assert len(pieces) == 20
    assert pieces == again
