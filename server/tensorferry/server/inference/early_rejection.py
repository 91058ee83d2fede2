"""Who is turned away in an overload before the message is read: that is most of what a call costs which is refused."""

from __future__ import annotations

from tensorferry.batcher import Batcher, QueueFull
from tensorferry.server.models.registry import ModelRegistry
from tensorferry.server.tracing.trace import Tracer


class EarlyRejection:
    """Only where one model is served is it known whose queue a call will meet, and only untraced calls have nothing else to tell.

    To be asked on one thread.
    """

    def __init__(self, registry: ModelRegistry, tracing: Tracer) -> None:
        self._registry = registry
        self._tracing = tracing
        self._generation = -1
        self._only_batcher: Batcher | None = None

    @property
    def tracing_enabled(self) -> bool:
        """Whether calls are traced, those that are refused as well."""
        return bool(self._tracing.sources)

    def refusal(self, deadline: float) -> QueueFull | None:
        """Why a call with this deadline is refused, which counts it; None where its message is to be read."""
        if self._registry.generation != self._generation:
            self.only_batcher()
        if self._only_batcher is None or self._tracing.sources:
            return None
        return self._only_batcher.foreseen(deadline)

    def only_batcher(self) -> Batcher | None:
        """The one that all calls meet; None where there are several, or none."""
        generation = self._registry.generation
        if generation != self._generation:
            models = self._registry.models()
            self._only_batcher = models[0].batcher if len(models) == 1 else None
            self._generation = generation
        return self._only_batcher
