"""Interface of the lane to its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.status import Status
from tensorferry.server.transport.call_admission import CallAdmission
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher
from tensorferry.server.transport.unread_responses import UnreadResponses

if TYPE_CHECKING:
    from tensorferry.server.transport.lane.stream import StreamCall


class CallOwner(Protocol):
    """The lane, for its calls."""

    # Guards `replied` and `watches_cancel` of every unary call. Nothing is called while it is held.
    lock: threading.Lock

    @property
    def admission(self) -> CallAdmission[Any]:
        """Counts the open calls."""

    @property
    def unread(self) -> UnreadResponses:
        """The bytes of responses that clients have not read."""

    @property
    def response_batcher(self) -> ResponseBatcher:
        """Sends the responses of a batch together."""

    @property
    def submit(self) -> Callable[..., InferenceCall]:
        """`InferenceService.submit`. Short batches run on the polling thread when no event is left."""

    def status_of(self, error: BaseException, reply: InferenceReply | None = None) -> Status:
        """See `InferenceService.status_of`."""

    def sent(self, reply: InferenceReply | None) -> None:
        """Record that a reply, or another end of a call, was sent. On the polling thread."""

    def stream_ended(self, stream: StreamCall) -> None:
        """Stop counting a stream."""
