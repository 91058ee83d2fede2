"""No request leaves cycles of objects behind: what they hold, such as calls and bodies, would wait for the garbage collector.

gRPC counts calls that still exist among the open ones of a connection.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import grpc
import numpy as np
import pytest
from polling import until
from support.models.small import keeping, written
from support.processes.probe import WAIT_SECONDS
from support.processes.server import ServerProcess, running

from tensorferry.client import InferenceClient, InferenceError, aio
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

_APP = """
import gc

from tensorferry.serving import FP32, INT32, STRING, InvalidInput, infer, model, onnx, pipeline

_OPEN = ("StreamCall", "ResponseStream", "StreamedInference", "Connection", "Exchange")


@model(inputs={"first": INT32[1]}, outputs={"garbage": STRING[-1], "open": INT32[1]}, max_batch_size=0, check=False)
def collect(first):
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    names = [f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage]
    gc.garbage.clear()
    gc.collect()
    ours = [name for name in names if name.startswith(("tensorferry", "grpc"))]
    return ours, [sum(type(each).__name__ in _OPEN for each in gc.get_objects())]


def checked(x):
    if (x < 0).any():
        raise InvalidInput("negative")
    if (x == 0).all():
        raise ValueError("zero")
    return x


@model(inputs={"x": FP32[-1, 3]}, outputs={"y": FP32[-1, 3]})
def double(x):
    return checked(x) * 2


@model(inputs={"x": FP32[-1, 3]}, outputs={"y": FP32[-1, 3]}, check=False)
def calls(x):
    return infer("double", x=x)["y"]


@model(inputs={"count": INT32[1]}, outputs={"number": INT32[1]}, streams=True, workers=2)
def counting(count):
    for number in range(count[0]):
        yield [number]


@model(inputs={"x": FP32[-1, 3]}, outputs={"y": FP32[-1, 3]})
def shifted(x):
    return checked(x) + 1


negated = pipeline("negated", shifted, onnx("negative.onnx"), outputs=["z"])
sums = onnx("sums.onnx", states={"past": "next"})
"""
X = np.ones((1, 3), np.float32)
TIMES = 5


@pytest.fixture(scope="module")
def server(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("garbage")
    written(folder / "negative.onnx", "(float[n, 3] y) => (float[n, 3] z) { z = Neg (y) }")
    keeping(folder / "sums.onnx")
    (folder / "app.py").write_text(_APP)
    with running(
        folder / "app.py", "--processes", "1", "--http-port", "0", transport=transport, logs_errors=True
    ) as started:
        yield started


class Caller:
    """Sends requests of each kind."""

    def __init__(self, server: ServerProcess, client: InferenceClient, channel: grpc.Channel) -> None:
        self._client, self._channel = client, channel
        self._stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._http = server.ready["http"].removeprefix("http://")

    def unary(self) -> None:
        self._client.infer("double", {"x": X})
        self._client.infer("calls", {"x": X})
        self._client.infer("negated", {"x": np.repeat(X, 100, 0)})

    def refused(self) -> None:
        wrong = (-X, 0 * X, X[:, 1:])
        for name, x in [("nothing", X), *product(("double", "calls", "negated"), wrong)]:
            request = pb.ModelInferRequest(model_name=name, raw_input_contents=[x.tobytes()])
            request.inputs.add(name="x", datatype="FP32", shape=x.shape)
            with pytest.raises(grpc.RpcError):
                self._stub.ModelInfer(request, timeout=WAIT_SECONDS)
            (answer,) = self._stub.ModelStreamInfer(iter([request]), timeout=WAIT_SECONDS)
            assert answer.error_message

    def late(self) -> None:
        with contextlib.suppress(InferenceError):
            self._client.infer("double", {"x": X}, timeout=0.001)
        # It leaves before its message.
        unary: Any = self._channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        silent = threading.Event()
        call = unary.future(iter(silent.wait, True))
        self._client.infer("double", {"x": X})
        call.cancel()
        silent.set()

    def streams(self) -> None:
        list(self._client.stream("double", [{"x": X}] * 3))
        # It leaves before the last answer.
        next(self._client.stream("double", [{"x": X}] * 3))

    def sequences(self) -> None:
        with self._client.sequence("sums") as sequence:
            sequence.infer({"x": X})
            with pytest.raises(InferenceError):
                sequence.infer({"x": X[:, 1:]})

    def streams_of_answers(self) -> None:
        for count in (0, 3):
            assert (
                len(list(self._client.stream("counting", [{"count": np.array([count], np.int32)}]))) == count
            )
        next(self._client.stream("counting", [{"count": np.array([1000], np.int32)}]))

    def over_http(self) -> None:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": X.tolist()}
        for path, body in (
            ("double/infer", {"inputs": [tensor]}),
            ("double/infer", {}),
            ("nothing/infer", {}),
        ):
            self._post(path, json.dumps(body)).read()
        self._post("counting/generate_stream", '{"count": [3]}').read()
        # It leaves before the last event.
        self._post("counting/generate_stream", '{"count": [1000]}').read(20)

    def half_of_a_body(self) -> None:
        connection = http.client.HTTPConnection(self._http, timeout=WAIT_SECONDS)
        connection.putrequest("POST", "/v2/models/double/infer")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b"{")
        connection.close()

    def _post(self, path: str, body: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._http, timeout=WAIT_SECONDS)
        connection.request("POST", f"/v2/models/{path}", body, {"Connection": "close"})
        return connection.getresponse()


@pytest.mark.parametrize(
    "send",
    [
        *(Caller.unary, Caller.refused, Caller.late, Caller.streams, Caller.sequences),
        *(Caller.streams_of_answers, Caller.over_http, Caller.half_of_a_body),
    ],
)
def test_requests_leave_no_garbage(server: ServerProcess, send: Callable[[Caller], None]) -> None:
    with InferenceClient(server.address) as client, grpc.insecure_channel(server.address) as channel:

        def collect() -> Any:
            return client.infer("collect", {"first": np.zeros(1, np.int32)})

        caller = Caller(server, client, channel)
        send(caller)
        collect()
        for _ in range(TIMES):
            send(caller)
        found: list[str] = []

        def open_calls() -> int:
            answer = collect()
            found.extend(answer["garbage"])
            return int(answer["open"][0])

        until(open_calls, lambda count: not count)
        assert not found


async def test_errors_of_clients_leave_no_garbage(server: ServerProcess) -> None:
    """They refer to the request, which may be large."""
    gone: list[weakref.ref[InferenceError]] = []
    gc.disable()
    try:
        with InferenceClient(server.address) as client:
            for send in (
                lambda: client.infer("double", {"x": -X}),
                lambda: list(client.stream("double", [{"x": -X}])),
            ):
                try:
                    send()
                except InferenceError as error:
                    gone.append(weakref.ref(error))
        async with aio.InferenceClient(server.address) as asynchronous:
            try:
                await asynchronous.infer("double", {"x": -X})
            except InferenceError as error:
                gone.append(weakref.ref(error))
            try:
                async for _ in asynchronous.stream("double", [{"x": -X}]):
                    pass
            except InferenceError as error:
                gone.append(weakref.ref(error))
        assert [error() for error in gone] == [None] * 4
    finally:
        gc.enable()
