"""Helpers of the server's tests: signatures, requests, replies to wait for."""

from __future__ import annotations

import http.client
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from hypothesis import settings

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import DATATYPES, datatype_of, encode_contents, encode_raw
from tensorferry.server.app import App
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.signature import Signature, TensorSpec

Array = npt.NDArray[Any]
Make = Callable[..., App]
Load = Callable[..., Model]

# Seconds. A bound for waits that end at once unless something is broken.
PATIENCE = 30.0

# The same examples in every run, at any speed of the machine.
reproducible = settings(derandomize=True, deadline=None, database=None)


def spec(name: str, datatype: str, *dims: int | str, binary: bool = False) -> TensorSpec:
    return TensorSpec(name, DATATYPES[datatype], dims, binary=binary)


def signature(*specs: TensorSpec, outputs: tuple[TensorSpec, ...] = ()) -> Signature:
    """A signature with these inputs, and these outputs, or by default the inputs again."""
    return Signature(specs, outputs or specs)


def request(
    arrays: Mapping[str, Array], *, typed: bool = False, model: str = "m", **fields: Any
) -> pb.ModelInferRequest:
    """A request with these inputs. An array of uint16 is UINT16; set the tensor's `datatype` for BF16."""
    message = pb.ModelInferRequest(model_name=model, **fields)
    for name, array in arrays.items():
        kind = DATATYPES[datatype_of(array)]
        tensor = message.inputs.add(name=name, datatype=kind.name, shape=array.shape)
        if typed:
            encode_contents(array, kind, tensor.contents)
        else:
            message.raw_input_contents.append(encode_raw(array))
    return message


def fp32(*shape: int) -> Array:
    """0, 1, 2, ... in this shape."""
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


class Replies:
    """A completion that keeps the replies. Thread-safe."""

    def __init__(self) -> None:
        self.all: list[InferenceReply] = []
        self._arrived = threading.Event()

    def __call__(self, reply: InferenceReply) -> None:
        self.all.append(reply)
        self._arrived.set()

    def first(self) -> InferenceReply:
        assert self._arrived.wait(PATIENCE), "no completion"
        return self.all[0]


@contextmanager
def made_apps(path: Path) -> Iterator[Make]:
    """Yields a function that makes a server of this model `m` on a free port. The servers are stopped at the end."""
    apps: list[App] = []

    def make(**options: Any) -> App:
        always = {"models": (ModelSource("m", path),), "port": 0, "device": "cpu"}
        apps.append(App(ServerConfig(**{**always, **options})))
        return apps[-1]

    yield make
    for app in apps:
        assert app.stop()


def ask(url: str, path: str | None = None, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    """The status, headers and body of an HTTP response."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
    connection.request(method, path or parts.path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::1", 0))
    except OSError:
        return False
    return True


def response_of(reply: InferenceReply) -> pb.ModelInferResponse:
    """The response that a reply serialises. Raises the request's error."""
    return pb.ModelInferResponse.FromString(reply.message())


def infer(service: InferenceService, message: pb.ModelInferRequest | bytes) -> pb.ModelInferResponse:
    """The response to a request. Raises the request's error."""
    replies = Replies()
    data = message if isinstance(message, bytes) else message.SerializeToString()
    service.submit(data, math.inf, replies)
    return response_of(replies.first())
