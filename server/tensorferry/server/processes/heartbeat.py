"""A server process's answers to the supervisor's pings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

# Less than the time between two pings.
_TIMEOUT_SECONDS = 8.0


class Heartbeat:
    """Calls its own process by a private socket, so that the thread which serves all calls must work for an answer.

    `alive` is called for each call that gets any answer, also a refusal. Not thread-safe.
    """

    def __init__(self, path: Path, alive: Callable[[], None]) -> None:
        # That of the process before, which was killed.
        path.unlink(missing_ok=True)
        self.socket = str(path)
        self._alive = alive
        self._stub: Any = None

    def ask(self) -> None:
        """Make a call. Does not wait for the answer."""
        if self._stub is None:
            channel = grpc.insecure_channel(f"unix:{self.socket}")
            self._stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = self._stub.ServerLive.future(pb.ServerLiveRequest(), timeout=_TIMEOUT_SECONDS)
        call.add_done_callback(self._answered)

    def _answered(self, call: Any) -> None:
        silent = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        if call.code() not in silent:
            self._alive()
