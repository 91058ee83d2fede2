"""A scripted server that records the messages it gets, and holds some of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import grpc
import numpy as np
from client.scripted import Context, ScriptedServer, echo, model

from tensorferry.client import Coalesce
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import Array

# Groups are sent only when a message ends, or when they are full.
PATIENT = Coalesce(max_wait=1000.0)
BAD = 99.0


@dataclass
class Script:
    """Answers of the model `m`: twice its rows, of at most 8. The first `held` messages wait for `release`.

    `statuses` are those of the first messages after those held, None for an answer. A message with
    the row BAD always fails with INVALID_ARGUMENT, and one with another row `wrong` with an answer
    of one row. `messages` has the first numbers of the rows of each message.
    """

    held: int = 1
    statuses: list[grpc.StatusCode | None] = field(default_factory=list)
    trailers: tuple[tuple[str, str], ...] = ()
    one_row: bool = False
    messages: list[list[float]] = field(default_factory=list)
    timeouts: list[float | None] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    left: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    release: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, server: ScriptedServer) -> None:
        """Install the script."""
        server.servicer.models["m"] = model("m", {"x": "FP32 -1 2"}, {"x": "FP32 -1 2"})
        server.servicer.infer = self._infer

    def _infer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        rows = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(-1, 2)
        with self.lock:
            self.messages.append(rows[:, 0].tolist())
            self.timeouts.append(context.time_remaining())
            held = len(self.messages) <= self.held
            status = self.statuses.pop(0) if self.statuses and not held else None
        if held:
            if not context.add_callback(self.left.release):
                self.left.release()
            self.begun.release()
            assert self.release.wait(30)
        if status is not None:
            context.set_trailing_metadata(self.trailers)
            context.abort(status, "scripted failure")
        if BAD in rows[:, 0]:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a bad row")
        answer = echo(request)
        answer.raw_output_contents[0] = (2 * rows).tobytes()
        if self.one_row and len(rows) > 1:
            answer.outputs[0].shape[0] = 1
            answer.raw_output_contents[0] = bytes(8)
        return answer


def inputs(number: float, rows: int = 1) -> dict[str, object]:
    """Return rows that begin with this number and count up from it."""
    x: Array = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    x[:, 0] = number
    return {"x": x}


def expected(number: float, rows: int = 1) -> Array:
    """Return the answer to these inputs."""
    x = inputs(number, rows)["x"]
    assert isinstance(x, np.ndarray)
    return 2 * x
