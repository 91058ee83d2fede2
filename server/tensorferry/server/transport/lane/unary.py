"""One ModelInfer of the lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorferry.protos import SERVICE_NAME
from tensorferry.server.errors import ServerError
from tensorferry.server.identity import ClientIdentity
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.status import INTERNAL_ERROR, Status, StatusCode
from tensorferry.server.transport.lane import cygrpc
from tensorferry.server.transport.unread_responses import SMALL_BYTES, ResponseAccount

if TYPE_CHECKING:
    from tensorferry.server.transport.lane.lane import Lane

UNARY = f"/{SERVICE_NAME}/ModelInfer"

_BUILT = ServerError("the message was built")


class UnaryCall:
    """One unary call. Its events come on the polling thread, its reply on any thread.

    It has two batches of operations: one receives the message, one sends metadata, message and status. A third, which
    watches for the client's cancellation, is started only for a call that waits long.
    """

    __slots__ = (
        "_account",
        "_call",
        "_caller",
        "_deadline",
        "_handle",
        "_left",
        "_metadata",
        "_owner",
        "_reply",
        "replied",
        "watches_cancel",
    )

    def __init__(self, owner: Lane, event: Any, deadline: float, caller: ClientIdentity) -> None:
        """Receive the message. `ended` is called exactly once unless this raises."""
        self._owner = owner
        self._call = event.call
        self._caller = caller
        self._deadline = deadline
        self._metadata = event.invocation_metadata
        self._handle: InferenceCall | None = None
        self._reply: InferenceReply | None = None
        self._account: ResponseAccount | None = None
        # Whether the client has left, perhaps before its message was handled.
        self._left = False
        self.replied = self.watches_cancel = False
        event.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self.received)

    def received(self, event: Any) -> None:
        """Submit the message, if the client has sent one."""
        data = event.batch_operations[0].message()
        if data is None:
            # The client sent no message. If it has left, or core has refused its message, the status is not sent.
            self.end(Status(StatusCode.UNIMPLEMENTED, f"{UNARY} requires exactly one request message"))
            return
        self._handle = self._owner.submit(data, self._deadline, self.end, self._metadata, self._caller)
        if self._left:
            self._handle.cancel()

    def end(self, result: InferenceReply | Status) -> None:
        """Send a response or a status, now or with the others of its batch. Called once, on any thread."""
        data = b""
        if not isinstance(result, Status):
            self._reply = result
            try:
                data = b"".join(result.pieces())
                if len(data) > SMALL_BYTES:
                    self._count_response(result, len(data))
            except BaseException as error:
                result = self._owner.status_of(error, result)
        operations: tuple[Any, ...]
        if isinstance(result, Status):
            operations = (cygrpc.SEND_INITIAL_METADATA, cygrpc.send_status(result))
        else:
            message = cygrpc.SendMessageOperation(data, 0)
            operations = (cygrpc.SEND_INITIAL_METADATA, message, cygrpc.SEND_OK)
        with self._owner.lock:
            self.replied = True
            watches_cancel = self.watches_cancel
        if not watches_cancel:
            # Core regards a call as abandoned unless its close is asked for once.
            operations = (*operations, cygrpc.IGNORE_CLOSE)
        collected = self._owner.response_batcher.this_thread.collected
        if collected is None:
            self._call.start_server_batch(operations, self.ended)
        else:
            collected.append((len(data), self._call.start_server_batch, (operations, self.ended)))

    def _count_response(self, reply: InferenceReply, nbytes: int) -> None:
        """Count a response whose message was built; UnreadResponsesError if it must not be kept."""
        self._account = cygrpc.account_of(self._call)
        error = self._owner.unread.add(self._account, nbytes)
        if error is not None:
            raise error
        # The message is a copy, and without this the tensors would be kept until the client has read it.
        reply.replace_with_error(_BUILT)

    def fail(self) -> None:
        """End the call with INTERNAL after an unexpected exception, unless it has or will have a reply."""
        if self._call is not None and self._handle is None and not self.replied:
            self.end(INTERNAL_ERROR)

    def ended(self, event: Any) -> None:
        """Release everything: the response was sent, or the client has left."""
        # The lane still refers to this object for a while. Core's call is released now, so that its memory is reused
        # while it is in the cache.
        reply, self._reply, self._handle = self._reply, None, None
        self._call = self._metadata = None
        if self._account is not None:
            self._owner.unread.close(self._account)
        self._owner.admission.calls.end_unary()
        if self._owner.response_batcher.handovers:
            self._owner.response_batcher.flush()
        if reply is not None and reply.trace is not None:
            reply.trace.sent()

    def watch_for_cancel(self) -> None:
        """Cancel the request if the client leaves, or has left, from now on."""
        with self._owner.lock:
            if self.replied:
                return
            self.watches_cancel = True
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self.closed)

    def closed(self, event: Any) -> None:
        """Cancel the request if the client has left."""
        self._left = event.batch_operations[0].cancelled()
        if self._left and self._handle is not None:
            self._handle.cancel()
