"""Future of a call in the background; cancelling it cancels the call on the server."""

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
from tensorferry.client.connection.context import Deadline
from tensorferry.client.connection.retry import Attempts
from tensorferry.client.errors import ClientClosed, InferenceError
from tensorferry.client.messages import codec
from tensorferry.client.messages.results import InferenceResult


class InferenceFuture(Future[InferenceResult]):
    """A `concurrent.futures.Future` of one request. Thread-safe.

    `cancel()` cancels the call on the server too, until the answer has arrived. Callbacks run on
    the client's threads, as with `concurrent.futures`, so they must not block.

    `start` begins the call, within `deadline`. `refused` is called with the error of the call, and
    `compared` with the result of the answer; it raises the error of one that does not fit. A
    call that `attempts` allows to repeat is in `retry_queue` until then. The future has one owner
    at a time, which alone may complete it: grpcio, which runs `_finish` once per call, or the code
    that removed it from `retry_queue`.

    >>> future = client.submit("digits", {"image": np.zeros((1, 8, 8), np.uint8)})
    >>> future.result(timeout=30)["probabilities"].shape
    (1, 10)
    """

    def __init__(
        self,
        start: Callable[[], Any],
        request_id: str,
        refused: Callable[[InferenceError], None],
        compared: Callable[[InferenceResult], InferenceResult],
        attempts: Attempts,
        deadline: Deadline,
        retry_queue: RetryQueue,
    ) -> None:
        super().__init__()
        # Released when the future completes: all hold the request, and the call also holds the answer.
        self._start: Callable[[], Any] | None = start
        self._compared: Callable[[InferenceResult], InferenceResult] | None = compared
        self._call: Any = None
        self._request_id = request_id
        self._refused = refused
        self._attempts = attempts
        self._deadline = deadline
        self._retry_queue = retry_queue
        call = self._call = start()
        call.add_done_callback(self._finish)

    def cancel(self) -> bool:
        """Cancel the future and its call; return False if the answer has already arrived.

        >>> future = client.submit("digits", {"image": np.zeros((1, 8, 8), np.uint8)})
        >>> future.cancel() == future.cancelled()
        True
        """
        if not super().cancel():
            return False
        call = self._call
        if self._retry_queue.withdraw(self):
            self._claim_outcome()
        elif call is not None:
            # grpcio then runs _finish, which notifies the waiters of the future.
            call.cancel()
        return True

    def _finish(self, call: Any) -> None:
        if not self.cancelled() and self._wait(call):
            return
        compared = self._compared
        if not self._claim_outcome():
            return
        try:
            answer = call.result()
            self._attempts.answered()
            assert compared is not None
            # Fetches the metadata on this thread, only for an answer that differs from what is known.
            result = compared(codec.decode(answer))
        except grpc.RpcError as error:
            failure = errors.from_rpc(error, self._request_id)
            self._refused(failure)
            self.set_exception(failure)
        except Exception as failure:  # grpcio would only log it, and the future would never complete
            self.set_exception(failure)
        else:
            self.set_result(result)

    def _wait(self, call: Any) -> bool:
        """Hand the future to the retry queue; return False if this call's outcome is final."""
        if call.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
            return False
        failure = errors.from_rpc(call, self._request_id)
        delay = self._attempts.delay(failure, call, self._deadline.left())
        if delay is None or not self._retry_queue.add(self, delay):
            return False
        # A cancel() before the queue had the future found a finished call, so it notified no waiter.
        return not (self.cancelled() and self._retry_queue.withdraw(self))

    def _retry(self) -> None:
        """Begin the call again; the retry queue has already removed the future."""
        assert self._start is not None
        try:
            call = self._call = self._start()
        except Exception as failure:
            ended = self._retry_queue.closed or isinstance(failure, ClientClosed)
            self._fail(errors.closed_during_call(self._request_id) if ended else failure)
            return
        if self.cancelled():
            call.cancel()
        call.add_done_callback(self._finish)

    def _fail(self, failure: Exception) -> None:
        if self._claim_outcome():
            self.set_exception(failure)

    def _claim_outcome(self) -> bool:
        """Return whether to set an outcome; if the future was cancelled, notify its waiters instead."""
        self._start = self._compared = self._call = None
        return self.set_running_or_notify_cancel()


class RetryQueue:
    """Futures of one client whose calls wait for a retry, and the thread that starts the retries.

    The thread exists only while a future waits. Thread-safe; no future is called under the lock.
    """

    def __init__(self) -> None:
        # Guards every field below; `closed` may be read without it.
        self._changed = threading.Condition(threading.Lock())
        self.closed = False
        self._futures: set[InferenceFuture] = set()
        # Heap by due time. A withdrawn future stays in it until it is first.
        self._due: list[tuple[float, int, InferenceFuture]] = []
        self._numbers = itertools.count()
        self._running = False

    def add(self, future: InferenceFuture, delay: float) -> bool:
        """Retry the call after `delay` seconds, or fail the future if closed; False if no thread can start."""
        with self._changed:
            if not self.closed:
                if not self._running:
                    thread = threading.Thread(target=self._run, name="tensorferry-retry", daemon=True)
                    try:
                        thread.start()
                    except (RuntimeError, MemoryError):
                        # The system has no thread left, or the interpreter is exiting.
                        return False
                    self._running = True
                self._futures.add(future)
                heapq.heappush(self._due, (time.monotonic() + delay, next(self._numbers), future))
                self._changed.notify()
                return True
        future._fail(errors.closed_during_call(future._request_id))
        return True

    def withdraw(self, future: InferenceFuture) -> bool:
        """Remove a waiting future; return whether it waited. The caller then owns it."""
        with self._changed:
            if future not in self._futures:
                return False
            self._futures.remove(future)
            self._changed.notify()
            return True

    def close(self) -> None:
        """Fail all waiting futures, and all that are added later, with `Cancelled`."""
        with self._changed:
            self.closed = True
            futures = list(self._futures)
            self._futures.clear()
            self._changed.notify()
        for future in futures:
            future._fail(errors.closed_during_call(future._request_id))

    def _run(self) -> None:
        while (future := self._next()) is not None:
            future._retry()

    def _next(self) -> InferenceFuture | None:
        """Wait for the next due future; None if none waits, and the thread must end."""
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
