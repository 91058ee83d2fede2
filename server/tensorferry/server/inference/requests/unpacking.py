"""Compressed requests of a transport with one thread for all calls, submitted on other threads.

Decompressing and checking a message takes up to 30 ms, which would delay every other call on that thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from tensorferry.batcher import Cancelled
from tensorferry.server.identity import ClientIdentity, Metadata
from tensorferry.server.inference.reply import InferenceCall, InferenceReply, TakeAnswer, error_reply

_log = logging.getLogger("tensorferry.server")


class Submit(Protocol):
    """`InferenceService.submit`."""

    def __call__(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata,
        *,
        caller: ClientIdentity,
        stream: object,
        answers: TakeAnswer | None,
    ) -> InferenceCall:
        """Serve one request."""


class _PendingCall(InferenceCall):
    """A request that waits for a thread; later, its call."""

    __slots__ = ("_call", "_lock", "_withdraw")

    def __init__(self) -> None:
        # Guards both below. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._call: InferenceCall | None = None
        # How to withdraw the call once there is one; None unless the request was withdrawn.
        self._withdraw: Callable[[InferenceCall], None] | None = None

    @property
    def withdrawn(self) -> bool:
        with self._lock:
            return self._withdraw is not None

    def submitted(self, call: InferenceCall) -> None:
        with self._lock:
            self._call, withdraw = call, self._withdraw
        if withdraw is not None:
            withdraw(call)

    def cancel(self) -> None:
        self._withdraw_by(lambda call: call.cancel())

    def abandon(self) -> None:
        self._withdraw_by(lambda call: call.abandon())

    def _withdraw_by(self, withdraw: Callable[[InferenceCall], None]) -> None:
        with self._lock:
            self._withdraw, call = withdraw, self._call
        if call is not None:
            withdraw(call)


class Unpacker:
    """Calls `submit` on the threads of an executor. Thread-safe.

    After the executor is shut down, `submit` is called on the calling thread.
    """

    def __init__(self, submit: Submit, threads: Executor) -> None:
        self._submit = submit
        self._threads = threads

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata,
        caller: ClientIdentity,
        stream: object = None,
        answers: TakeAnswer | None = None,
        submitted: Callable[[], None] = lambda: None,
    ) -> InferenceCall:
        """See `InferenceService.submit`. A request that is withdrawn before a thread takes it is not unpacked.

        `submitted` is called once the service has the request, or it is answered.
        """
        pending = _PendingCall()

        def serve() -> None:
            try:
                if pending.withdrawn:
                    left = Cancelled("the caller left before its message was unpacked")
                    complete(error_reply("", left, ("", ""), metadata))
                    return
                try:
                    call = self._submit(
                        data, deadline, complete, metadata, caller=caller, stream=stream, answers=answers
                    )
                except Exception as error:
                    _log.exception(
                        "a compressed request could not be served; this is a bug in tensorferry.server"
                    )
                    complete(error_reply("", error, ("", ""), metadata))
                    return
                pending.submitted(call)
            finally:
                submitted()

        try:
            self._threads.submit(serve)
        except RuntimeError:
            serve()
        return pending
