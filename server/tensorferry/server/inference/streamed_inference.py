"""Requests to a model that answers in streams: they take answers while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorferry.batcher import Outcome
from tensorferry.server.errors import InvalidRequestError, UnsupportedError
from tensorferry.server.inference.pending_inference import PendingArguments, PendingInference
from tensorferry.server.inference.reply import InferenceReply, Piece, TakeAnswer

# The answers to a request that wait to be sent. Above this, the function waits: a client that does not read stops it.
_MOST_UNSENT = 4


def unary_call_error(model: str) -> UnsupportedError:
    """Return the error of a call that can have one answer only."""
    return UnsupportedError(
        f"model {model!r} answers in streams, and this call has one answer: ModelInfer RPC doesn't support models with "
        "decoupled transaction policy; call ModelStreamInfer, or over HTTP POST /v2/models/NAME/generate_stream"
    )


def shared_memory_error(model: str) -> InvalidRequestError:
    """Return the error of a request with tensors in shared memory."""
    return InvalidRequestError(
        f"model {model!r} answers in streams, so its tensors cannot be in shared memory; send them in the message"
    )


class StreamedInference(PendingInference):
    """A request that takes several answers while it runs; see `StreamFunction`. Its own reply is the last response, or none.

    `send` is called with each answer. As with the completion, the object refers to it only until it is completed.
    """

    __slots__ = ("_changed", "_on_over", "_over", "_send", "_unsent")

    def __init__(self, send: TakeAnswer, *request: *PendingArguments) -> None:
        super().__init__(*request)
        self._send = send
        # Guards the fields below; notified of each change. Nothing is called while it is held.
        self._changed = threading.Condition()
        self._unsent = 0
        self._over = False
        self._on_over: Callable[[], None] | None = None

    def take(self, outputs: Mapping[str, Any]) -> bool:
        """Send an answer, and wait until there is room for another one. Return whether it is wanted.

        Raises what keeps the answer from being sent, such as LimitError.
        """
        arrays = {name: np.asarray(output) for name, output in outputs.items()}
        pieces = self._template.response.pieces(self._id_field, Outcome(arrays))
        with self._changed:
            while self._unsent >= _MOST_UNSENT and not self._over:
                self._changed.wait()
            if self._over:
                return False
            self._unsent += 1
            send = self._send
        error = send(_Answer(self, pieces))
        if error is not None:
            raise error
        return True

    def on_over(self, call: Callable[[], None]) -> None:
        """Call a function, on any thread, if the request ends before its last answer; at once if it has."""
        with self._changed:
            if not self._over:
                self._on_over = call
                return
        call()

    def answer_sent(self) -> None:
        """Make room for another answer."""
        with self._changed:
            self._unsent -= 1
            self._changed.notify_all()

    def completed(self, outcome: Outcome) -> None:
        """Take the outcome, which has no outputs, and call the completion. The batcher calls this once."""
        with self._changed:
            self._over = True
            del self._send
            on_over, self._on_over = self._on_over, None
            self._changed.notify_all()
        if on_over is not None:
            on_over()
        super().completed(outcome)

    @property
    def silent(self) -> bool:  # type: ignore[override]
        """See `InferenceReply`. As in Triton, a client must ask for a response after the last answer."""
        return self.outcome.error is None and not self._template.empty_final

    def pieces(self) -> Sequence[Piece]:
        """See `InferenceReply`."""
        if self.outcome.error is not None:
            raise self.outcome.error
        return self._template.response.without_outputs(self._id_field)


class _Answer(InferenceReply):
    """An answer before the last response."""

    __slots__ = ("_pieces", "_request", "metadata", "request_id", "trace")

    last = False

    def __init__(self, request: StreamedInference, pieces: Sequence[Piece]) -> None:
        self._request = request
        self._pieces = pieces
        self.request_id, self.metadata, self.trace = request.request_id, request.metadata, None

    @property
    def addressed(self) -> tuple[str, str]:
        return self._request.addressed

    @property
    def output_bytes(self) -> int:
        return sum(len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in self._pieces)

    def replace_with_error(self, error: Exception) -> None:
        raise AssertionError("an answer is made already")

    def pieces(self) -> Sequence[Piece]:
        return self._pieces

    def sent(self) -> None:
        self._request.answer_sent()
