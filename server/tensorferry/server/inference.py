"""The inference service itself, transport-free: bytes and a deadline in, one completion out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from tensorferry.batcher import Batcher, Outcome, Request
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.codec import Decoded, decode, encode, parse
from tensorferry.server.errors import ModelFailedError, NotReadyError
from tensorferry.server.models import Model, ModelRegistry

_log = logging.getLogger("tensorferry.server")


class Reply(NamedTuple):
    """What became of one ModelInfer. Whoever sends the response builds it, by calling `response`.

    So the batcher's worker does not build them for everyone while the device waits.
    """

    request_id: str
    build: Callable[[], pb.ModelInferResponse]

    def response(self) -> pb.ModelInferResponse:
        """The response, or what went wrong, raised."""
        return self.build()


def _failed(request_id: str, error: BaseException) -> Reply:
    def build() -> pb.ModelInferResponse:
        raise error

    return Reply(request_id, build)


class Call:
    """One request in flight. `cancel` may be called at any time, from any thread, repeatedly."""

    __slots__ = ("_batcher", "_request")

    def __init__(self, batcher: Batcher | None = None, request: Request | None = None) -> None:
        self._batcher = batcher
        self._request = request

    def cancel(self) -> None:
        """Withdraws the request if it is not done; its completion is then called with the reason."""
        if self._batcher is not None and self._request is not None:
            self._batcher.cancel(self._request)


class InferenceService:
    """Takes requests from a transport and hands each to its model's batcher. Thread-safe."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self._draining = threading.Event()

    def begin_drain(self) -> None:
        """From now on every request is answered with NotReadyError; accepted ones go on."""
        self._draining.set()

    @property
    def draining(self) -> bool:
        """Whether the server accepts no more requests."""
        return self._draining.is_set()

    def infer(self, data: bytes, deadline: float, complete: Callable[[Reply], None]) -> Call:
        """Serves one ModelInferRequest; `complete` is called exactly once, perhaps before this returns.

        `deadline` is on the clock of `time.monotonic`, inf for none. Never blocks, never
        raises for what the client sent: errors arrive in the reply.
        """
        now = time.monotonic()
        request = pb.ModelInferRequest()
        try:
            request = parse(data, pb.ModelInferRequest)
            if self.draining:
                raise NotReadyError(
                    "the server is shutting down and has stopped accepting new requests; retry elsewhere"
                )
            model = self._registry.get(request.model_name, request.model_version)
            decoded = decode(request, model.name, model.signature, model.batched)
            deadline = min(deadline, now + min(decoded.timeout, model.slo))
            queued = self._request(request, model, decoded, deadline, complete)
            model.batcher.enqueue(queued)
        except Exception as error:
            complete(_failed(request.id, error))
            return Call()
        return Call(model.batcher, queued)

    @staticmethod
    def _request(
        request: pb.ModelInferRequest,
        model: Model,
        decoded: Decoded,
        deadline: float,
        complete: Callable[[Reply], None],
    ) -> Request:
        # The tensors hold their bytes; a second copy need not wait in the queue.
        request.ClearField("raw_input_contents")
        request.ClearField("inputs")

        def completed(outcome: Outcome) -> None:
            if isinstance(outcome.error, ModelFailedError):
                cause = outcome.error.__cause__
                _log.warning("model %s failed on request %r: %s", model.name, request.id, cause)
            if outcome.error is not None:
                complete(_failed(request.id, outcome.error))
            else:
                complete(Reply(request.id, lambda: encode(request, model.version, decoded, outcome)))

        names = tuple(spec.name for spec in model.signature.inputs)
        plan = None
        if model.padding is not None:
            plan = model.padding.plan(names, [(tensor.dtype, tensor.shape) for tensor in decoded.tensors])
        return Request(
            decoded.tensors,
            completed,
            names=names,
            rows=decoded.rows,
            nbytes=decoded.nbytes if plan is None else decoded.nbytes + plan.added_bytes,
            key=decoded.key if plan is None else plan.shapes,
            deadline=deadline,
            # As in Triton: a class that there is not is the default.
            priority=decoded.priority if decoded.priority <= model.batcher.priorities else 0,
            padding=plan,
        )
