"""Calls of the synchronous client while they wait for others, and the messages that have them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from tensorferry.client.coalescing.gathering import Group
from tensorferry.client.coalescing.outcomes import CallFailure
from tensorferry.protos import inference_pb2 as pb


class Signal(enum.Enum):
    """Events of a waiting call that are neither its outcome nor a group to send."""

    # The call's open group need not wait any longer.
    RELEASED = enum.auto()
    # The call must be made alone.
    ALONE = enum.auto()


class WaitingCall:
    """Call of a thread that waits. The thread acts on the events in its inbox: it can send messages."""

    def __init__(
        self, request: pb.ModelInferRequest, deadline: float | None, options: dict[str, Any]
    ) -> None:
        self.request = request
        self.deadline = deadline
        self.options = options
        # When the thread sends the call's open group at the latest, if this is the group's first call.
        self.due: float | None = None
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        # Kept until the thread sends it, because an interrupt may come between the inbox and there.
        self._to_send: Group[AnyCall] | None = None
        self._left = False

    def cancelled(self) -> bool:
        """Return whether the thread has left because of an exception, such as KeyboardInterrupt."""
        return self._left

    def leave(self) -> Group[AnyCall] | None:
        """Record that the thread has left; return a group that it should have sent."""
        self._left = True
        return self._to_send

    def wait(self, seconds: float | None) -> Any:
        """Return the next event: a Signal, a group to send, an answer or an exception; RELEASED after `seconds`."""
        try:
            return self._inbox.get(timeout=seconds)
        except Empty:
            return Signal.RELEASED

    def released(self) -> None:
        """Let the thread send the open group that begins with this call, if no other thread has taken it."""
        self._inbox.put(Signal.RELEASED)

    def send(self, group: Group[AnyCall]) -> None:
        """Let the thread send a group that has this call."""
        self._to_send = group
        self._inbox.put(group)

    def sending(self) -> None:
        """Record that the thread sends the group."""
        self._to_send = None

    def answer(self, response: pb.ModelInferResponse) -> None:
        """Complete the call."""
        self._inbox.put(response)

    def fail(self, failure: Exception) -> None:
        """Complete the call with an error."""
        self._inbox.put(failure)

    def repeat(self) -> None:
        """Let the thread make the call alone."""
        self._inbox.put(Signal.ALONE)


class FutureCall(Future[pb.ModelInferResponse]):
    """Call without a thread, with the methods of grpcio's futures that the client uses.

    `begin` makes the call alone if its message fails. `cancel` cancels the message once all its
    calls are cancelled.
    """

    def __init__(
        self,
        request: pb.ModelInferRequest,
        deadline: float | None,
        options: dict[str, Any],
        begin: Any,
    ) -> None:
        super().__init__()
        self.request = request
        self.deadline = deadline
        self.options = options
        self._begin = begin
        self._message: Message | None = None
        self._alone: Any = None
        self._failure: Any = None

    def cancel(self) -> bool:
        """Cancel the call; return False if it is done."""
        if not super().cancel():
            return False
        if self._message is not None:
            self._message.cancel_if_unwanted()
        if self._alone is not None:
            self._alone.cancel()
        return True

    def code(self) -> grpc.StatusCode:
        """Return the status code of the finished call."""
        if self.cancelled():
            return grpc.StatusCode.CANCELLED
        if self._failure is None:
            return grpc.StatusCode.OK
        code: grpc.StatusCode = self._failure.code()
        return code

    def details(self) -> str:
        """Return the server's text."""
        return "" if self._failure is None else str(self._failure.details() or "")

    def trailing_metadata(self) -> Any:
        """Return the trailing metadata."""
        return () if self._failure is None else self._failure.trailing_metadata()

    def sent_in(self, message: Message) -> None:
        """Record the message that has the call."""
        self._message = message

    def answer(self, response: pb.ModelInferResponse) -> None:
        """Complete the call, unless it is cancelled."""
        if not self.done() and self.set_running_or_notify_cancel():
            self.set_result(response)

    def fail(self, failure: Exception) -> None:
        """Complete the call with an error, unless it is cancelled."""
        if not isinstance(failure, grpc.RpcError):
            # A bug. The client reads a status code from every future.
            failure = CallFailure(grpc.StatusCode.INTERNAL, f"{type(failure).__name__}: {failure}")
        if self.done():
            return
        self._failure = failure
        if self.set_running_or_notify_cancel():
            self.set_exception(failure)

    def repeat(self) -> None:
        """Make the call alone."""
        if self.cancelled():
            return
        alone = self._alone = self._begin(self)
        if self.cancelled():
            alone.cancel()
        alone.add_done_callback(self._copy)

    def _copy(self, alone: Any) -> None:
        if alone.code() is grpc.StatusCode.OK:
            self.answer(alone.result())
        else:
            self.fail(CallFailure(alone.code(), alone.details() or "", alone.trailing_metadata()))


AnyCall = WaitingCall | FutureCall


class Message:
    """A message in flight that no thread waits for, and its calls."""

    def __init__(self, calls: Sequence[AnyCall]) -> None:
        self._calls = calls
        self._call: Any = None
        for call in calls:
            if isinstance(call, FutureCall):
                call.sent_in(self)

    def started(self, call: Any) -> None:
        """Record grpcio's call."""
        self._call = call
        self.cancel_if_unwanted()

    def cancel_if_unwanted(self) -> None:
        """Cancel the message if all its calls are cancelled. The last of them to be cancelled finds that."""
        if self._call is not None and all(call.cancelled() for call in self._calls):
            self._call.cancel()
