"""Rejection under overload before the message is read, because reading is most of a rejected call's cost."""

from __future__ import annotations

from tensorferry.batcher import QueueFull
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.observability.tracing.trace import Tracer


class EarlyRejection:
    """Rejects calls that the queue would reject, while one model is served and nothing is traced.

    With several models the model of an unread call is unknown, and a trace needs the message. Thread-safe.
    """

    def __init__(self, registry: ModelRegistry, tracer: Tracer) -> None:
        self._registry = registry
        self._tracer = tracer

    @property
    def tracing_enabled(self) -> bool:
        """Whether calls are traced; rejected calls are then traced too."""
        return bool(self._tracer.sources)

    @property
    def one_model(self) -> bool:
        """Whether exactly one model is loaded, so that every call is for it."""
        return self._registry.only_model is not None

    def check(self, deadline: float) -> QueueFull | None:
        """Return, and count, why a call with this deadline is rejected; None if its message is to be read."""
        model = self._registry.only_model
        if model is None or self._tracer.sources:
            return None
        return model.batcher.fast_reject(deadline)
