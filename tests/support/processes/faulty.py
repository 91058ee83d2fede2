"""`tensorferry` on a device with CUDA's failures, which requests cause; for models such as `probe`.

Run as a program. The first number of a row says what happens to its run. Each of several processes has one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc._server
import numpy as np
from support.processes.children import serve_with_children

from tensorferry.batcher.execution.executor import BatchExecutor
from tensorferry.batcher.request import BatchAssignment, Request
from tensorferry.server.__main__ import main
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.runtime.recovery import recovering_instance
from tensorferry.server.runtime.session import Session
from tensorferry.server.startup import run_child

# From this value on a row breaks the device once; with exactly this value, in every run.
ONCE, ALWAYS = 100_000.0, 99_999.0
# The run does not return until the file exists.
HANG = 88_888.0

# From this value on a worker's own code raises SystemExit, once, during a batch.
FALL = 70_000.0
_PAST_FALL = 80_000.0
# While this file exists, grpcio's own code raises on the polling thread.
POLLING = "FAULTY_POLLING"

# Rows that fit into the device's memory, failing attempts to create a session again, and that file.
ROOM, VAIN, RELEASE = "FAULTY_ROOM", "FAULTY_VAIN", "FAULTY_RELEASE"

_NO_MEMORY = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running MatMul node. "
    "Name:'' Status Message: bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) "
    "Failed to allocate memory for requested buffer of size 4294967296"
)
_BROKEN = (
    "[ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; "
    "hostname=x ; file=cuda_call.cc ; line=124 ; expr=cudaStreamSynchronize(stream)"
)


class Faults:
    """Stands between the batcher and the sessions; a base class."""

    def __init__(self) -> None:
        # Guards _seen.
        self._lock = threading.Lock()
        self._seen: set[Any] = set()
        # Sessions of which every run fails.
        self.broken: set[int] = set()
        product: Any = Session
        executor: Any = BatchExecutor
        self._run, self._make, self._execute = product.run, product.__init__, executor.run
        product.run = lambda session, inputs: self.run(session, inputs)
        product.__init__ = lambda session, *given, **options: self.make(session, *given, **options)
        executor.run = lambda running, batch, work: self.execute(running, batch, work)

    def first(self, mark: Any) -> bool:
        """Return whether this is the first time for this mark."""
        with self._lock:
            known = mark in self._seen
            self._seen.add(mark)
            return not known

    def make(self, session: Session, *given: Any, **options: Any) -> None:
        self._make(session, *given, **options)
        self.broken.clear()

    def run(self, session: Session, inputs: Mapping[str, Any]) -> Any:
        if id(session) in self.broken:
            raise failed(_BROKEN)
        return self._run(session, inputs)

    def execute(self, running: BatchExecutor, batch: Sequence[Request], work: BatchAssignment) -> Any:
        for request in batch:
            for tensor in request.tensors:
                if request.rows and self.falls(np.frombuffer(tensor.data, tensor.dtype)):
                    raise SystemExit
        return self._execute(running, batch, work)

    def falls(self, values: Any) -> bool:
        """Return whether a tensor with these values ends its worker."""
        raise NotImplementedError


class _Device(Faults):
    def __init__(self) -> None:
        super().__init__()
        self._room = int(os.environ.get(ROOM, "1000000"))
        self._vain = int(os.environ.get(VAIN, "0"))

    def make(self, session: Session, *given: Any, **options: Any) -> None:
        if self.broken and self._vain:
            self._vain -= 1
            raise StartError(_BROKEN)
        super().make(session, *given, **options)

    def run(self, session: Session, inputs: Mapping[str, Any]) -> Any:
        x = inputs["x"]
        for mark in {float(row[0]) for row in x}:
            if mark == HANG:
                while not Path(os.environ[RELEASE]).exists():
                    time.sleep(0.01)
            if mark == ALWAYS or (mark >= ONCE and self.first(mark)):
                self.broken.add(id(session))
        if id(session) not in self.broken and len(x) > self._room:
            raise failed(_NO_MEMORY)
        return super().run(session, inputs)

    def falls(self, values: Any) -> bool:
        return FALL <= values[0] < _PAST_FALL and self.first(float(values[0]))


def failed(message: str) -> ModelFailedError:
    error = ModelFailedError("the model failed on this request")
    error.__cause__ = RuntimeError(message)
    return error


def install_device() -> None:
    """Replace the device of this process."""
    recovering_instance._FIRST_SECONDS = 0.02
    _Device()


def install_polling() -> None:
    """Let grpcio's polling thread of this process fail while the file exists."""
    polling: Any = grpc._server
    handle = polling._process_event_and_continue

    def process(*arguments: Any) -> Any:
        if POLLING in os.environ and Path(os.environ[POLLING]).exists():
            raise RuntimeError("can't start new thread")
        return handle(*arguments)

    polling._process_event_and_continue = process


if __name__ == "__main__":
    install_device()
    install_polling()
    if sys.argv[1] != "serve":
        # It is one of several server processes.
        run_child("tensorferry.server.processes.server")
    serve_with_children("support.processes.faulty")
    sys.exit(main())
