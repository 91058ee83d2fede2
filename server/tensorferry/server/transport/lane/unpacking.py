"""Compressed requests of the lane, served on threads of their own.

To unpack a message and to walk through it takes up to some 30 ms. The polling thread serves everybody, so it does neither.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from tensorferry.batcher import Cancelled
from tensorferry.server.identity import Caller, Metadata
from tensorferry.server.inference.reply import Call, Reply, failed

_log = logging.getLogger("tensorferry.server")


class Infer(Protocol):
    """`InferenceService.infer`."""

    def __call__(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[Reply], None],
        metadata: Metadata,
        *,
        caller: Caller,
    ) -> Call:
        """Serve one request."""


class _Waiting(Call):
    """A request that waits for a thread, and then the call that serves it."""

    __slots__ = ("_call", "_lock", "_withdraw")

    def __init__(self) -> None:
        # Guards both below. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._call: Call | None = None
        # How the call is to be withdrawn as soon as there is one.
        self._withdraw: Callable[[Call], None] | None = None

    @property
    def withdrawn(self) -> bool:
        with self._lock:
            return self._withdraw is not None

    def served_by(self, call: Call) -> None:
        with self._lock:
            self._call, withdraw = call, self._withdraw
        if withdraw is not None:
            withdraw(call)

    def cancel(self) -> None:
        self._by(lambda call: call.cancel())

    def abandon(self) -> None:
        self._by(lambda call: call.abandon())

    def _by(self, withdraw: Callable[[Call], None]) -> None:
        with self._lock:
            self._withdraw, call = withdraw, self._call
        if call is not None:
            withdraw(call)


class Unpacker:
    """Has `infer` called on the threads of an executor. Thread-safe.

    The completion of each request is called once, on any thread. After the executor is shut down, `infer` is called at once.
    """

    def __init__(self, infer: Infer, threads: Executor) -> None:
        self._infer = infer
        self._threads = threads

    def infer(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[Reply], None],
        metadata: Metadata,
        caller: Caller,
    ) -> Call:
        """As `InferenceService.infer`, but that nothing is done here. A request that is withdrawn first is not unpacked."""
        waiting = _Waiting()

        def serve() -> None:
            if waiting.withdrawn:
                left = Cancelled("the caller left before its message was unpacked")
                complete(failed("", left, ("", ""), metadata))
                return
            try:
                call = self._infer(data, deadline, complete, metadata, caller=caller)
            except Exception as error:
                _log.exception(
                    "a compressed request could not be served; this is a bug in tensorferry.server"
                )
                complete(failed("", error, ("", ""), metadata))
                return
            waiting.served_by(call)

        try:
            self._threads.submit(serve)
        except RuntimeError:
            serve()
        return waiting
