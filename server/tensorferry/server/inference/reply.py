"""What a transport has of a request: the call while it is in flight, and the reply that it then sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tensorferry.batcher import Batcher
from tensorferry.server.identity import Metadata
from tensorferry.server.inference.responses import Piece, stream_response
from tensorferry.server.telemetry import logs
from tensorferry.server.telemetry.trace_context import parse_trace_context
from tensorferry.server.tracing.trace import RequestTrace


class InferenceReply:
    """What became of one ModelInfer. Whoever sends the response builds it, by one of the methods."""

    __slots__ = ("_addressed", "_build", "_metadata", "request_id")

    # Of a request that is traced: whoever sends the response says when.
    trace: RequestTrace | None = None

    @property
    def addressed(self) -> tuple[str, str]:
        """Name and version of the model that it is from, or as the request had them; "" for what is not known."""
        return self._addressed

    @property
    def needs_run(self) -> Batcher | None:
        """The batcher that answered, if it now waits for `attend`."""
        return None

    def __init__(
        self,
        request_id: str,
        build: Callable[[], Sequence[Piece]],
        addressed: tuple[str, str] = ("", ""),
        metadata: Metadata = (),
    ) -> None:
        self.request_id = request_id
        self._build = build
        self._addressed = addressed
        self._metadata = metadata

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors that it keeps."""
        return 0

    def replace_with_error(self, error: Exception) -> None:
        """Let go of the tensors: the reply is this error now. Not while a message is built."""

        def build() -> Sequence[Piece]:
            raise error

        self._build = build

    def about(self) -> Mapping[str, str]:
        """Which request it is the reply to, for a line in the log."""
        return logs.request_fields(self.request_id, self.addressed, parse_trace_context(self._metadata))

    def pieces(self) -> Sequence[Piece]:
        """The serialised ModelInferResponse, in pieces; or what went wrong, raised."""
        return self._build()

    def message(self) -> bytes:
        """The serialised ModelInferResponse; or what went wrong, raised."""
        return b"".join(self.pieces())

    def stream_message(self) -> bytes:
        """The serialised ModelStreamInferResponse; or what went wrong, raised."""
        return b"".join(stream_response(self.pieces()))


def error_reply(
    request_id: str, error: BaseException, addressed: tuple[str, str], metadata: Metadata
) -> InferenceReply:
    """The reply to a request that met an error."""

    def build() -> Sequence[Piece]:
        raise error

    return InferenceReply(request_id, build, addressed, metadata)


class InferenceCall:
    """One request in flight. `cancel` may be called at any time, from any thread, repeatedly."""

    __slots__ = ()

    def cancel(self) -> None:
        """Withdraws the request if it is not done; its completion is then called with the reason."""

    def abandon(self) -> None:
        """The same, and tells that whoever sends responses will not send this one."""
        self.cancel()


# Of a request that was answered at once.
FINISHED = InferenceCall()
