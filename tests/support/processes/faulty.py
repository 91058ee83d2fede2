"""`tensorferry` on a device with CUDA's failures, which requests cause; for models such as `probe`.

Run as a program. The first number of a row says what happens to its run. Each of several processes has one.
"""

from __future__ import annotations

import os
import sys
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


class Fault:
    """Replaces `Session.run` and its construction once the model is loaded."""

    def __init__(self) -> None:
        self.room = int(os.environ.get(ROOM, "1000000"))
        self.vain = int(os.environ.get(VAIN, "0"))
        self.seen: set[float] = set()
        self.broken: set[int] = set()
        self.run, self.make = Session.run, Session.__init__
        Session.run = self.faulty_run(Session.run)  # type: ignore[method-assign]
        Session.__init__ = self.faulty_make(Session.__init__)  # type: ignore[method-assign]
        BatchExecutor.run = self.falling(BatchExecutor.run)  # type: ignore[method-assign]

    def faulty_make(self, make: Any) -> Any:
        def faulty(session: Session, *arguments: Any, **options: Any) -> None:
            if self.broken and self.vain:
                self.vain -= 1
                raise StartError(_BROKEN)
            make(session, *arguments, **options)
            self.broken.clear()

        return faulty

    def falling(self, run: Any) -> Any:
        def fall(running: BatchExecutor, batch: Sequence[Request], work: BatchAssignment) -> Any:
            for request in batch:
                for tensor in request.tensors:
                    mark = float(np.frombuffer(tensor.data, tensor.dtype)[0]) if request.rows else 0.0
                    if FALL <= mark < _PAST_FALL and mark not in self.seen:
                        self.seen.add(mark)
                        raise SystemExit
            return run(running, batch, work)

        return fall

    def faulty_run(self, run: Any) -> Any:
        def faulty(session: Session, inputs: Mapping[str, Any]) -> Any:
            x = inputs["x"]
            for mark in {float(row[0]) for row in x}:
                if mark == HANG:
                    while not Path(os.environ[RELEASE]).exists():
                        time.sleep(0.01)
                if mark == ALWAYS or (mark >= ONCE and mark not in self.seen):
                    self.seen.add(mark)
                    self.broken.add(id(session))
            if id(session) in self.broken:
                raise failed(_BROKEN)
            if len(x) > self.room:
                raise failed(_NO_MEMORY)
            return run(session, inputs)

        return faulty


def failed(message: str) -> ModelFailedError:
    error = ModelFailedError("the model failed on this request")
    error.__cause__ = RuntimeError(message)
    return error


def install_device() -> None:
    """Replace the device of this process."""
    recovering_instance._FIRST_SECONDS = 0.02
    Fault()


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
    serve_with_children("support.processes.faulty_process")
    sys.exit(main())
