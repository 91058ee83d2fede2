"""One request, and the check of its answer before anything is measured."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from serving.encodings import Output, grpc_message, grpc_output
from serving.load import STREAM_PATH, UNARY_PATH
from serving.peers.settings import Engine
from serving.servers import ECHO, ECHO_ASYNCIO, ECHO_STREAMS, HOST, Server
from serving.workloads import Workload
from tensorferry.protos import inference_pb2 as pb

_SECONDS = 20
OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
# Tolerance for float32 sums in another order.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4


class WrongAnswer(Exception):
    """The server's answer differs from the model's."""


def expected_output(workload: Workload, model: Path) -> Output:
    """Return the model's output for the measured row, computed without a server."""
    output: Output = Engine(model).run(workload.row())[0]
    return output


def ask(
    server: Server,
    workload: Workload,
    port: int,
    *,
    stream: bool,
    headers: Sequence[tuple[str, str]] = (),
) -> Output:
    """Return a server's answer to one request with these headers; raise whatever its client raises."""
    if server.http is not None:
        connection = http.client.HTTPConnection(HOST, port, timeout=_SECONDS)
        try:
            body, more = server.http.request(workload)
            path = server.http_path.format(model=workload.model)
            connection.request("POST", path, body, {"Content-Type": server.http.content_type, **dict(more)})
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise WrongAnswer(f"HTTP status {response.status}: {answer[:200]!r}")
        return server.http.decode(answer)
    message = grpc_message(workload, workload.row())
    if not stream:
        return ask_grpc(message, port, headers)
    with grpc.insecure_channel(f"{HOST}:{port}", options=OPTIONS) as channel:
        call: Any = channel.stream_stream(STREAM_PATH)
        for answer in call(iter([message]), timeout=_SECONDS, metadata=headers):
            said = pb.ModelStreamInferResponse.FromString(answer)
            if said.error_message:
                raise WrongAnswer(said.error_message)
            return grpc_output(said.infer_response)
    raise WrongAnswer("the stream ended without an answer")


def ask_grpc(message: bytes, port: int, headers: Sequence[tuple[str, str]] = ()) -> Output:
    """Return the only output of one ModelInferRequest; raise whatever gRPC raises."""
    return grpc_output(infer(message, port, headers))


def infer(message: bytes, port: int, headers: Sequence[tuple[str, str]] = ()) -> pb.ModelInferResponse:
    """Return the answer of one ModelInferRequest; raise whatever gRPC raises."""
    with grpc.insecure_channel(f"{HOST}:{port}", options=OPTIONS) as channel:
        call: Any = channel.unary_unary(UNARY_PATH)
        return pb.ModelInferResponse.FromString(call(message, timeout=_SECONDS, metadata=headers))


def check(
    server: Server,
    workload: Workload,
    port: int,
    expected: Output,
    *,
    stream: bool,
    headers: Sequence[tuple[str, str]] = (),
) -> None:
    """Raise WrongAnswer if the answer is wrong; for a bare echo only its size is checked."""
    got = ask(server, workload, port, stream=stream, headers=headers)
    compare(got, expected, values=server.name not in (ECHO, ECHO_STREAMS, ECHO_ASYNCIO))


def compare(got: Output, expected: Output, *, values: bool = True) -> None:
    """Raise WrongAnswer if the sizes differ, or values by more than sums of float32 in another order do."""
    if got.shape != expected.shape:
        raise WrongAnswer(f"an output of {got.size} values, not of {expected.size}")
    if values and not np.allclose(got, expected, _RELATIVE, _ABSOLUTE):
        raise WrongAnswer(f"off by {np.abs(got - expected).max():.2g} from the right answer")
