"""Ways to provoke errors over the wire: servers, requests to spoil, and a table by case."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from support.wire.rig import PATIENCE

from tensorferry.protos import inference_pb2 as pb

# A region of 64 bytes of host memory.
KEY = f"/tensorferry-page-{os.getpid()}"


class Served(NamedTuple):
    """A server without GPUs, whose region `r` is the 64-byte file of the key; and how to start another server.

    `control` belongs to a server with a repository, whose models clients load, and `plain` to one without shared memory.
    """

    stub: Any
    control: Any
    plain: Any
    repository: Path
    transport: str
    model: Path


def good(rows: int = 1, work: int = 0) -> pb.ModelInferRequest:
    """Return a good request to the probe model: work, x, index, in this order, raw."""
    request = pb.ModelInferRequest(model_name="probe")
    for name, datatype, array in (
        ("work", "INT64", np.full(rows, work, np.int64)),
        ("x", "FP32", np.zeros((rows, 4), np.float32)),
        ("index", "INT64", np.zeros(rows, np.int64)),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


Provoke = Callable[[Served], Any]


class Provoked(dict[str, Provoke]):
    """Functions that provoke an error, by case; filled by decorators, each case once."""

    def when(self, *cases: str) -> Callable[[Provoke], Provoke]:
        def add(provoke: Provoke) -> Provoke:
            for case in cases:
                assert case not in self
                self[case] = provoke
            return provoke

        return add

    def spoiled(self, case: str) -> Callable[[Callable[[pb.ModelInferRequest], Any]], None]:
        """Register a case: a good request, spoilt by the function."""

        def add(spoil: Callable[[pb.ModelInferRequest], Any]) -> None:
            def provoke(served: Served) -> Any:
                request = good()
                spoil(request)
                return infer(served, request)

            self.when(case)(provoke)

        return add


def infer(served: Served, request: pb.ModelInferRequest, **options: Any) -> Any:
    return served.stub.ModelInfer(request, timeout=PATIENCE, **options)


def set_(message: Any, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(message, name, value)
