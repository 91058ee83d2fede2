"""Requests of a stream that are in flight, and their outcomes.

A request is in flight from `add` until its outcome is taken, so the limit also bounds the
outcomes that a slow consumer has not taken. Answers are matched by request id, in any order.
A model that answers in streams gives several to a request. The last one may have no outputs.
Not thread-safe: the owner guards it.
"""

from __future__ import annotations

from collections import deque

import grpc

from tensorferry.client import errors
from tensorferry.client.errors import InferenceError, InvalidInput
from tensorferry.client.messages import codec
from tensorferry.client.messages.arguments import integer
from tensorferry.client.messages.results import InferenceResult
from tensorferry.client.messages.several_answers import is_last, takes_several
from tensorferry.protos import inference_pb2 as pb

Outcome = InferenceResult | InferenceError
# An outcome with the message of its request; None if it could not be sent.
Taken = tuple[Outcome, pb.ModelInferRequest | None]


class InFlight:
    """At most `limit` requests of one stream, with their outcomes.

    Outcomes are taken in request order if `ordered`, else in order of completion. Those before the
    last one of a request are taken as they come.
    """

    def __init__(self, limit: int, *, ordered: bool) -> None:
        self._limit = integer("max_in_flight", limit, 1, 2**31 - 1)
        self.ordered = ordered
        self._outcomes: dict[str, Outcome | None] = {}
        # Of the same requests.
        self._messages: dict[str, pb.ModelInferRequest | None] = {}
        # Outcomes before the last one of their request.
        self._earlier: deque[Taken] = deque()
        self._done: deque[str] = deque()
        self._awaited = 0

    @property
    def awaited(self) -> int:
        """Number of requests that wait for the server's answer."""
        return self._awaited

    def has_room(self) -> bool:
        """Return whether one more request may be added."""
        return len(self._outcomes) < self._limit

    def check_new(self, request_id: str) -> None:
        """Raise InvalidInput if the id is already in flight: its two answers could not be told apart."""
        if request_id in self._outcomes:
            raise InvalidInput(
                "the stream",
                "a request id that is not in flight",
                repr(request_id),
                "give each request an id of its own, or none to have one generated",
                request_id,
            )

    def add(self, request_id: str, message: pb.ModelInferRequest | None = None) -> None:
        """Add a request with a new id; without a message it cannot be sent."""
        self._outcomes[request_id] = None
        self._messages[request_id] = message
        self._awaited += 1

    def answer(self, answer: pb.ModelStreamInferResponse) -> None:
        """Record an answer of the server; see `settle`."""
        request_id, outcome = answer.infer_response.id, codec.decode_stream(answer)
        message = self._messages.get(request_id)
        several = message is not None and takes_several(message)
        if several and not is_last(answer.infer_response):
            self._earlier.append((outcome, message))
            return
        self.settle(request_id, outcome)
        if several and isinstance(outcome, InferenceResult) and not outcome.outputs:
            # It only says that there are no more.
            del self._outcomes[request_id], self._messages[request_id]
            if not self.ordered:
                self._done.pop()

    def settle(self, request_id: str, outcome: Outcome) -> None:
        """Record the last outcome of a request.

        Raises InferenceError with code UNKNOWN if no request with this id waits: the server
        answered twice or without the id, so the stream cannot be trusted any further.
        """
        if self._outcomes.get(request_id, outcome) is not None:
            said = f": {outcome.message}" if isinstance(outcome, InferenceError) else ""
            raise errors.of_code(
                grpc.StatusCode.UNKNOWN,
                f"the server answered request id {request_id!r}, which does not wait for an answer{said}",
                request_id,
            )
        self._outcomes[request_id] = outcome
        self._awaited -= 1
        if not self.ordered:
            self._done.append(request_id)

    def end(
        self, broken: InferenceError | None, *, all_sent: bool
    ) -> tuple[list[Taken], InferenceError | None]:
        """End the stream: return the outcomes not yet taken, and the error of the call, None for none.

        Unanswered requests get an error like it. Without an error of the call, they are one themselves, as are requests that
        were not sent.
        """
        text = None
        if self._awaited:
            text = f"the server ended the stream and left {self._awaited} requests unanswered"
        elif not all_sent:
            text = "the server ended the stream and did not wait for all requests"
        if broken is None and text is not None:
            broken = errors.of_code(grpc.StatusCode.UNKNOWN, text)
        if broken is None:
            return [], None
        taken = list(self._earlier)
        self._earlier.clear()
        for request_id, outcome in self._outcomes.items():
            if outcome is None:
                outcome = errors.of_code(broken.code, broken.message, request_id, broken.retry_after)
            taken.append((outcome, self._messages[request_id]))
        self._outcomes.clear()
        self._messages.clear()
        self._done.clear()
        self._awaited = 0
        return taken, broken

    def take(self) -> Taken | None:
        """Remove and return the next outcome, after which its id may be used again; None if none is due."""
        if self._earlier:
            return self._earlier.popleft()
        if self.ordered:
            request_id = next(iter(self._outcomes), None)
        else:
            request_id = self._done.popleft() if self._done else None
        outcome = None if request_id is None else self._outcomes[request_id]
        if request_id is None or outcome is None:
            return None
        del self._outcomes[request_id]
        return outcome, self._messages.pop(request_id)
