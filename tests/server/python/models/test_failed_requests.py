"""Requests for which a function fails: what reaches the client and the log, on both transports."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping

import grpc
import numpy as np
import pytest
from support.server.rig import PATIENCE, Array, request, signature, spec
from support.server.scripted_service import ServedTransport

from tensorferry.batcher import Batcher
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.models.lifecycle.registry import Model
from tensorferry.server.observability.logs.log_format import JsonFormatter
from tensorferry.server.python.models.failures import request_error, wrong_return
from tensorferry.serving import InvalidInput

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")
FAILED = "step 'tokenize' of model 'm' failed on this request: "
REASON = f"{FAILED}the server's log has the reason"

Function = Callable[[Mapping[str, Array]], dict[str, Array]]
Serve = Callable[[Function], None]


@pytest.fixture
def serve_function(served: ServedTransport) -> Iterator[Serve]:
    """Serve the model `m` of a function, x BYTES [batch] → y. Its batcher is closed after the test."""
    batchers: list[Batcher] = []

    def serve(function: Function) -> None:
        def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
            try:
                return function(inputs)
            except Exception as error:
                failure = request_error(error, "m", "tokenize")
            raise failure

        made = signature(spec("x", "BYTES", "batch"), outputs=(spec("y", "BYTES", "batch"),))
        batchers.append(Batcher(run, 8))
        served.registry.mark_ready(Model("m", "1", made, 8, "", batchers[-1]))
        served.be_real()

    yield serve
    for batcher in batchers:
        assert batcher.close()


def secretive(inputs: Mapping[str, Array]) -> dict[str, Array]:
    for text in inputs["x"]:
        if text == "bad":
            try:
                raise OSError("/secret/path")
            except OSError as error:
                raise ValueError("secret text") from error
        if text == "refused":
            raise InvalidInput("'refused' is no word") from OSError("/secret/path")
        if text == "wrong":
            raise wrong_return("output 'y' is INT64[1], declared STRING[-1]", "m", "tokenize")
    return {"y": inputs["x"]}


def message(text: str) -> pb.ModelInferRequest:
    return request({"x": np.array([text], dtype=object)}, id=f"id-{text}")


CASES = [
    ("bad", grpc.StatusCode.INTERNAL, REASON, "step 'tokenize' raised ValueError: secret text"),
    ("refused", grpc.StatusCode.INVALID_ARGUMENT, "'refused' is no word", None),
    (
        "wrong",
        grpc.StatusCode.INTERNAL,
        f"{FAILED}output 'y' is INT64[1], declared STRING[-1]",
        "step 'tokenize' returned a wrong result: output 'y' is INT64[1], declared STRING[-1]",
    ),
]


@pytest.mark.parametrize(("text", "code", "public", "logged"), CASES, ids=[case[0] for case in CASES])
def test_the_client_gets_no_more_than_the_message(
    served: ServedTransport,
    serve_function: Serve,
    caplog: pytest.LogCaptureFixture,
    text: str,
    code: grpc.StatusCode,
    public: str,
    logged: str | None,
) -> None:
    serve_function(secretive)
    caplog.set_level(logging.INFO)
    with pytest.raises(grpc.RpcError) as caught:
        served.stub.ModelInfer(message(text), timeout=PATIENCE, metadata=[TRACEPARENT])
    error = caught.value
    assert (error.code(), error.details()) == (code, public)
    assert "secret" not in str(error.trailing_metadata())
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (logged is not None)
    for record in warnings:
        assert record.getMessage() == f"model m failed on request 'id-{text}' (trace {TRACE}): {logged}"
        line = json.loads(JsonFormatter().format(record))
        assert (line["request_id"], line["model"], line["trace_id"]) == (f"id-{text}", "m", TRACE)
        if text == "bad":
            assert line["exception"].startswith("Traceback (most recent call last):")
            assert "OSError: /secret/path" in line["exception"]
            assert line["exception"].endswith("ValueError: secret text")
        else:
            assert "exception" not in line


def test_a_failure_among_others_is_logged_once_when_it_failed_alone(
    served: ServedTransport, serve_function: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serve_function(secretive)
    words = ["a", "b", "bad", "c", "d"]
    calls = [served.stub.ModelInfer.future(message(word), timeout=PATIENCE) for word in words]
    assert [call.exception(PATIENCE) is not None for call in calls] == [word == "bad" for word in words]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().startswith("model m failed on request 'id-bad': step 'tokenize' raised")
