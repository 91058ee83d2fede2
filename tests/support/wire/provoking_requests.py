"""Requests that give each error of docs/reference/protocol.md."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.processes import faulty
from support.processes.metrics import scrape_until
from support.processes.probe import request as probe_request
from support.processes.server import ServerProcess
from support.wire.provoking import Provoked, Served, good, infer, set_
from support.wire.rig import PATIENCE

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

PROVOKED = Provoked()
when, spoiled = PROVOKED.when, PROVOKED.spoiled

spoiled("the model is unknown")(lambda r: set_(r, model_name="nothing"))
spoiled("the version is unknown")(lambda r: set_(r, model_version="9"))
spoiled("the version is not a number")(lambda r: set_(r, model_version="one"))
spoiled("an input is missing")(lambda r: (r.inputs.pop(), r.raw_input_contents.pop()))
spoiled("an input is unknown")(lambda r: set_(r.inputs[1], name="z"))
spoiled("an input is given twice")(lambda r: r.inputs.append(r.inputs[1]))
spoiled("an output is unknown")(lambda r: r.outputs.add(name="z"))
spoiled("an output is requested twice")(lambda r: (r.outputs.add(name="y"), r.outputs.add(name="y")))
spoiled("the datatype is wrong")(lambda r: set_(r.inputs[1], datatype="FP64"))
spoiled("the shape does not fit")(lambda r: r.inputs[1].shape.__setitem__(slice(None), [2, 2]))
spoiled("the shape is empty")(lambda r: r.inputs[1].shape.__setitem__(slice(None), []))
spoiled("raw contents have the wrong size")(lambda r: r.raw_input_contents.__setitem__(1, bytes(15)))
spoiled("an input has no contents")(lambda r: r.ClearField("raw_input_contents"))
spoiled("raw contents are too few")(lambda r: r.raw_input_contents.pop())
spoiled("raw contents are too many")(lambda r: r.raw_input_contents.append(b""))
spoiled("contents are raw and typed")(lambda r: r.inputs[1].contents.fp32_contents.extend([0] * 4))
spoiled("text parameters are beside raw contents")(
    lambda r: set_(r.inputs[1].parameters["text"], string_param="a")
)
spoiled("a parameter is reserved")(lambda r: set_(r.parameters["triton_mine"], bool_param=True))
spoiled("a parameter has the wrong type")(lambda r: set_(r.parameters["priority"], string_param="1"))
spoiled("a custom parameter is a uint64")(lambda r: set_(r.parameters["mine"], uint64_param=1))
spoiled("the timeout is over")(lambda r: set_(r.parameters["timeout"], int64_param=1))
spoiled("the model fails")(lambda r: r.raw_input_contents.__setitem__(2, np.array([99]).tobytes()))
spoiled("the number of classes is not positive")(
    lambda r: set_(r.outputs.add(name="y").parameters["classification"], int64_param=0)
)


@spoiled("inputs differ in rows")
def _(request: pb.ModelInferRequest) -> None:
    request.inputs[1].shape[:] = [2, 4]
    request.raw_input_contents[1] = bytes(32)


@spoiled("typed contents are in a wrong field")
def _(request: pb.ModelInferRequest) -> None:
    request.ClearField("raw_input_contents")
    for given in request.inputs:
        given.contents.fp32_contents.extend([0] * (4 if given.name == "x" else 1))


@when("there are more rows than a batch holds")
def _(served: Served) -> Any:
    return infer(served, good(rows=100))


def texts(raw: bytes) -> pb.ModelInferRequest:
    """Return a request to the echo of strings, with one string."""
    request = pb.ModelInferRequest(model_name="texts", raw_input_contents=[raw])
    request.inputs.add(name="x", datatype="BYTES", shape=[1, 1])
    return request


@when("a string's length is incomplete")
def _(served: Served) -> Any:
    # Long enough for two empty strings.
    request = texts(b"\3\0\0\0abc\1\0")
    request.inputs[0].shape[:] = [1, 2]
    return infer(served, request)


@when("there are too many strings")
def _(served: Served) -> Any:
    return infer(served, texts(b"\1\0\0\0a\1\0\0\0b"))


@when("the classified output has no order")
def _(served: Served) -> Any:
    request = texts(b"\1\0\0\0a")
    request.outputs.add(name="y").parameters["classification"].int64_param = 1
    return infer(served, request)


@when("the classified output is too large")
def _(served: Served) -> Any:
    request = pb.ModelInferRequest(model_name="floats", raw_input_contents=[bytes(4 * 1_000_001)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1_000_001])
    request.outputs.add(name="y").parameters["classification"].int64_param = 1
    return infer(served, request)


@when("the queue is full")
def _(served: Served) -> Any:
    # More rows at once than may ever wait.
    return _first_error(
        [served.stub.ModelInfer.future(good(1000, work=1000), timeout=PATIENCE) for _ in range(9)]
    )


def _first_error(calls: list[Any]) -> Any:
    """Return the error of the first refused call, and cancel the others."""
    refused = threading.Event()
    for call in calls:
        call.add_done_callback(lambda done: refused.set())
    assert refused.wait(PATIENCE)
    (first, *_) = [call for call in calls if call.done()]
    for call in calls:
        call.cancel()
    return first.result()


@when("the server stops")
def _(served: Served) -> Any:
    # A separate server, because it is stopped, with a request that outlasts the test.
    program = [sys.executable, str(Path(faulty.__file__))]
    variables = {faulty.RELEASE: str(served.repository / "never")}
    options = (served.model, "--metrics-port", "0")
    server = ServerProcess.start(*options, transport=served.transport, program=program, variables=variables)
    try:
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=PATIENCE
            )
            running = stub.ModelInfer.future(probe_request(1, first=faulty.HANG), timeout=PATIENCE)
            scrape_until(server, lambda found: found["tensorferry_running_requests"] == 1)
            statuses = (change.status for change in watch)
            assert next(statuses) == health_pb2.HealthCheckResponse.SERVING
            server.signal()
            assert next(statuses) == health_pb2.HealthCheckResponse.NOT_SERVING
            try:
                return stub.ModelInfer(good(), timeout=PATIENCE)
            finally:
                running.cancel()
    finally:
        # A signal would wait for the end of the request that hangs.
        server.process.kill()
        server.wait()
