"""The future of a call that runs in the background, and whose cancellation reaches the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc

from tensorferry.client import errors, message
from tensorferry.client.errors import InferenceError
from tensorferry.client.message import InferenceResult


class InferenceFuture(Future[InferenceResult]):
    """A `concurrent.futures.Future` of one request.

    `cancel()` cancels the call on the server too, at any time before the answer is there.
    Callbacks run on the channel's own thread, as do those of `concurrent.futures`: they must
    not block. May be used from any thread.

    `start` begins the call. `again` says of an error, and of how often the call was begun, after how many
    seconds it is begun again, None for never.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        request_id: str,
        refused: Callable[[InferenceError], None],
        again: Callable[[InferenceError, int], float | None],
    ) -> None:
        super().__init__()
        self._start = start
        self._request_id = request_id
        self._refused = refused
        self._again = again
        self._attempt = 1
        # Guards _timer, which runs while the call waits to be begun again. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._call = start()
        self._call.add_done_callback(self._finish)

    def cancel(self) -> bool:
        """Cancels the future and its call; False when the answer was there before."""
        if not super().cancel():
            return False
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self.set_running_or_notify_cancel()
        else:
            # grpcio then runs _finish, which tells those who wait for the future.
            self._call.cancel()
        return True

    def _finish(self, call: Any) -> None:
        if not self.cancelled() and self._wait(call):
            return
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = message.decode(call.result())
        except grpc.RpcError as error:
            failure = errors.from_rpc(error, self._request_id)
            self._refused(failure)
            self.set_exception(failure)
        except Exception as failure:  # grpcio would only log it, and the future never end
            self.set_exception(failure)
        else:
            self.set_result(result)

    def _wait(self, call: Any) -> bool:
        """Whether the call is to be begun again, or was cancelled while that was found out."""
        if call.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            return False
        delay = self._again(errors.from_rpc(call, self._request_id), self._attempt)
        if delay is None:
            return False
        timer = threading.Timer(delay, self._begin_again)
        timer.daemon = True
        with self._lock:
            if self.cancelled():
                # The call was over: it tells nobody any more.
                return False
            self._timer = timer
        timer.start()
        return True

    def _begin_again(self) -> None:
        with self._lock:
            if self._timer is None:
                return
            self._timer = None
        self._attempt += 1
        try:
            call = self._call = self._start()
        except Exception:
            # The client was closed meanwhile.
            if self.set_running_or_notify_cancel():
                self.set_exception(errors.closed(self._request_id))
            return
        if self.cancelled():
            call.cancel()
        call.add_done_callback(self._finish)
