"""Calls of other models by a function in a child process: the child's side, and the server's."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import numpy.typing as npt

from tensorferry.server.processes.functions.errors import SentError
from tensorferry.server.processes.functions.values import dumps, encode, loads
from tensorferry.server.processes.in_child import Parent
from tensorferry.server.system.threads import ThreadKind, new_thread
from tensorferry.serving import InvalidInput, submit

# Kinds of messages. The child sends CALL, with a number. The server sends ANSWER or FAILED for it, and after the run OVER.
CALL, ANSWER, FAILED, OVER = "call", "answer", "failed", "over"


class CallsToServer:
    """`ModelCaller` of one run in the child. Thread-safe.

    The first call starts a thread that receives the answers until the run is over. Only that thread receives meanwhile.
    """

    def __init__(self, server: Parent) -> None:
        self._server = server
        # Guards _over and _reader, and is held while a message is sent. The server always reads.
        self._lock = threading.Lock()
        self._over = False
        self._numbers = count(1)
        self._reader: threading.Thread | None = None
        # Set by the calling thread before the call is sent, taken by the reader.
        self._open: dict[int, Future[dict[str, Any]]] = {}

    def submit(
        self, model: str, version: str, inputs: Mapping[str, npt.ArrayLike], timeout: float | None
    ) -> Future[dict[str, Any]]:
        """Send a call to the server; the future gets the answer. RuntimeError after the end of the run."""
        future: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        try:
            sent = {name: encode(value, None, f"input {name!r}") for name, value in inputs.items()}
            content = dumps((model, version, sent, timeout))
        except MemoryError:
            raise
        except Exception as error:
            future.set_exception(InvalidInput(f"{error} (in a call of model {model!r})"))
            return future
        with self._lock:
            if self._over:
                raise RuntimeError(
                    f"{model!r} was called after the function had returned; wait for calls in it"
                )
            if self._reader is None:
                # Before the call is sent, because its answer must be read, also if no thread can be started.
                reader = new_thread("tensorferry-answers", self._read, ThreadKind.ESSENTIAL)
                reader.start()
                self._reader = reader
            self._open[number] = future
            self._server.send(CALL, {"number": number}, content)
        return future

    def wait(self) -> None:
        """Wait until all calls are answered."""
        wait(self._open.copy().values())

    def end(self, kind: str, content: bytes) -> None:
        """Send the last message of the run, and end the thread. Calls without an answer fail."""
        with self._lock:
            self._over = True
            self._server.send(kind, content=content)
        if self._reader is not None:
            self._reader.join()

    def _read(self) -> None:
        while (message := self._server.receive()) is not None and message.kind != OVER:
            future = self._open.pop(message.fields["number"])
            content = loads(message.content, None)
            if message.kind == FAILED:
                _fail(future, content.exception())
            elif future.set_running_or_notify_cancel():
                future.set_result(content)
        while self._open:
            _, future = self._open.popitem()
            _fail(future, RuntimeError("the function returned before the call was answered"))


class ServedCalls:
    """Calls of one run, on the server's side. Futures are completed by any thread, all else is the run's thread.

    `wake_fd` is readable when there are answers to send.
    """

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Guards _over, and keeps `wake_fd` open while it is written to.
        self._lock = threading.Lock()
        self._over = False
        self._done: deque[int] = deque()
        self._open: dict[int, Future[dict[str, Any]]] = {}

    def begin(self, number: int, content: bytes) -> None:
        """Begin a call through the `ModelCaller` of this thread's context."""
        try:
            model, version, inputs, timeout = loads(content, None)
            future = submit(model, inputs, version=version, timeout=timeout)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        self._open[number] = future
        future.add_done_callback(partial(self._completed, number))

    def answers(self) -> Iterator[tuple[str, dict[str, int], bytes]]:
        """Yield the kind, fields and content of the answer to each call that is done."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        while self._done:
            number = self._done.popleft()
            kind, content = _answer(self._open.pop(number))
            yield kind, {"number": number}, content

    def end(self) -> None:
        """Cancel what is not done. Its answers are not sent."""
        with self._lock:
            self._over = True
            os.close(self.wake_fd)
        for future in self._open.values():
            future.cancel()

    def _completed(self, number: int, future: Future[dict[str, Any]]) -> None:
        with self._lock:
            if not self._over:
                self._done.append(number)
                os.eventfd_write(self.wake_fd, 1)


def _answer(future: Future[dict[str, Any]]) -> tuple[str, bytes]:
    try:
        return ANSWER, dumps(encode(future.result(), None, "the answer"))
    except BaseException as error:
        return FAILED, dumps(SentError.of(error))


def _fail(future: Future[Any], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
