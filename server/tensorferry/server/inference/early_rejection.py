"""Rejection under overload before the message is read, because reading is most of a rejected call's cost."""

from __future__ import annotations

from tensorferry.batcher import Batcher, QueueFull
from tensorferry.server.models.registry import ModelRegistry
from tensorferry.server.tracing.trace import Tracer


class EarlyRejection:
    """Rejects calls that the queue would reject, while one model is served and nothing is traced.

    With several models the model of an unread call is unknown, and a trace needs the message. Thread-safe.
    """

    def __init__(self, registry: ModelRegistry, tracer: Tracer) -> None:
        self._registry = registry
        self._tracer = tracer
        # The registry's generation and its only batcher, replaced together.
        self._known: tuple[int, Batcher | None] = (-1, None)

    @property
    def tracing_enabled(self) -> bool:
        """Whether calls are traced; rejected calls are then traced too."""
        return bool(self._tracer.sources)

    def check(self, deadline: float) -> QueueFull | None:
        """Return, and count, why a call with this deadline is rejected; None if its message is to be read."""
        batcher = self.only_batcher()
        if batcher is None or self._tracer.sources:
            return None
        return batcher.fast_reject(deadline)

    def only_batcher(self) -> Batcher | None:
        """Return the batcher of the only model; None if there are several models, or none."""
        generation = self._registry.generation
        known_generation, batcher = self._known
        if generation != known_generation:
            models = self._registry.models()
            batcher = models[0].batcher if len(models) == 1 else None
            self._known = generation, batcher
        return batcher
