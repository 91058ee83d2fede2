"""The future of a call that runs in the background, and whose cancellation reaches the server."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc

from tensorferry.client import errors
from tensorferry.client.connection.deadline import Deadline
from tensorferry.client.connection.retry import Attempts
from tensorferry.client.errors import ClientClosed, InferenceError
from tensorferry.client.messages import tensors
from tensorferry.client.messages.tensors import InferenceResult


class InferenceFuture(Future[InferenceResult]):
    """A `concurrent.futures.Future` of one request.

    `cancel()` cancels the call on the server too, at any time before the answer is there.
    Callbacks run on the client's own threads, as do those of `concurrent.futures`: they must
    not block. May be used from any thread.

    `start` begins the call, within `deadline`; `refused` is told of the error that it ended with. A call that
    `attempts` lets begin again is in `waiting` until then. At any time one of them owns the future and may end it: grpcio,
    which runs `_finish` once for each call, or whoever took it from `waiting`.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        request_id: str,
        refused: Callable[[InferenceError], None],
        attempts: Attempts,
        deadline: Deadline,
        waiting: Waiting,
    ) -> None:
        super().__init__()
        # Both hold the request, and the second the answer as well: None once the future has ended.
        self._start: Callable[[], Any] | None = start
        self._call: Any = None
        self._request_id = request_id
        self._refused = refused
        self._attempts = attempts
        self._deadline = deadline
        self._waiting = waiting
        call = self._call = start()
        call.add_done_callback(self._finish)

    def cancel(self) -> bool:
        """Cancels the future and its call; False when the answer was there before."""
        if not super().cancel():
            return False
        call = self._call
        if self._waiting.withdraw(self):
            self._begin_end()
        elif call is not None:
            # grpcio then runs _finish, which tells those who wait for the future.
            call.cancel()
        return True

    def _finish(self, call: Any) -> None:
        if not self.cancelled() and self._wait(call):
            return
        if not self._begin_end():
            return
        try:
            answer = call.result()
            self._attempts.answered()
            result = tensors.decode(answer)
        except grpc.RpcError as error:
            failure = errors.from_rpc(error, self._request_id)
            self._refused(failure)
            self.set_exception(failure)
        except Exception as failure:  # grpcio would only log it, and the future never end
            self.set_exception(failure)
        else:
            self.set_result(result)

    def _wait(self, call: Any) -> bool:
        """Whether another owns the future now; else the call has ended it."""
        if call.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
            return False
        failure = errors.from_rpc(call, self._request_id)
        delay = self._attempts.delay(failure, call, self._deadline.left())
        if delay is None or not self._waiting.add(self, delay):
            return False
        # Who cancelled it before it waited found only a call that was over, which tells nobody any more.
        return not (self.cancelled() and self._waiting.withdraw(self))

    def _begin_again(self) -> None:
        """Its time has come; `waiting` has given it up."""
        assert self._start is not None
        try:
            call = self._call = self._start()
        except Exception as failure:
            ended = self._waiting.closed or isinstance(failure, ClientClosed)
            self._fail(errors.closed(self._request_id) if ended else failure)
            return
        if self.cancelled():
            call.cancel()
        call.add_done_callback(self._finish)

    def _fail(self, failure: Exception) -> None:
        if self._begin_end():
            self.set_exception(failure)

    def _begin_end(self) -> bool:
        """Whether the future's outcome is to be set; else it was cancelled, of which all are told now."""
        self._start = self._call = None
        return self.set_running_or_notify_cancel()


class Waiting:
    """The futures of one client whose calls wait to be begun again, and the thread that begins them.

    It runs only while any wait. Thread-safe; no future is called while the lock is held.
    """

    def __init__(self) -> None:
        # Guards all that follows, but that `closed` is read without.
        self._changed = threading.Condition(threading.Lock())
        self.closed = False
        self._futures: set[InferenceFuture] = set()
        # When they are due; those that were withdrawn stay until they are first.
        self._due: list[tuple[float, int, InferenceFuture]] = []
        self._numbers = itertools.count()
        self._running = False

    def add(self, future: InferenceFuture, delay: float) -> bool:
        """Begins the call again in so many seconds, or ends the future if this was closed; False if neither can be."""
        with self._changed:
            if not self.closed:
                if not self._running:
                    thread = threading.Thread(target=self._run, name="tensorferry-retry", daemon=True)
                    try:
                        thread.start()
                    except (RuntimeError, MemoryError):
                        # The system has no thread left, or the interpreter ends.
                        return False
                    self._running = True
                self._futures.add(future)
                heapq.heappush(self._due, (time.monotonic() + delay, next(self._numbers), future))
                self._changed.notify()
                return True
        future._fail(errors.closed(future._request_id))
        return True

    def withdraw(self, future: InferenceFuture) -> bool:
        """Whether the future waited; it is the caller's to end then."""
        with self._changed:
            if future not in self._futures:
                return False
            self._futures.remove(future)
            self._changed.notify()
            return True

    def close(self) -> None:
        """Ends those that wait, and those that come, with `Cancelled`."""
        with self._changed:
            self.closed = True
            futures = list(self._futures)
            self._futures.clear()
            self._changed.notify()
        for future in futures:
            future._fail(errors.closed(future._request_id))

    def _run(self) -> None:
        while (future := self._next()) is not None:
            future._begin_again()

    def _next(self) -> InferenceFuture | None:
        """Waits for the next that is due; None when none waits, and the thread is to end."""
        with self._changed:
            while self._futures:
                due, _, future = self._due[0]
                left = due - time.monotonic()
                if future not in self._futures:
                    heapq.heappop(self._due)
                elif left > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                else:
                    heapq.heappop(self._due)
                    self._futures.remove(future)
                    return future
            self._due.clear()
            self._running = False
            return None
