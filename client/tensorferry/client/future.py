"""The future of a call that runs in the background, and whose cancellation reaches the server."""

from __future__ import annotations

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
    """

    def __init__(
        self,
        call: Any,
        request_id: str,
        refused: Callable[[InferenceError], None],
    ) -> None:
        super().__init__()
        self._call = call
        self._request_id = request_id
        self._refused = refused
        call.add_done_callback(self._finish)

    def cancel(self) -> bool:
        """Cancels the future and its call; False when the answer was there before."""
        if not super().cancel():
            return False
        # grpcio then runs _finish, which tells those who wait for the future.
        self._call.cancel()
        return True

    def _finish(self, call: Any) -> None:
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
