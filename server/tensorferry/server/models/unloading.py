"""Models on their way out: each answers what it has accepted, and ends."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from tensorferry.server.models.registry import Model, ModelRegistry


class ModelUnloader:
    """Models that take no more requests, each with a thread that waits for its end. Thread-safe.

    `changed` is called with a model's name when it has ended.
    """

    def __init__(self, registry: ModelRegistry, changed: Callable[[str], None]) -> None:
        self._registry = registry
        self._changed = changed
        # Guards _models. Nothing is waited for while it is held.
        self._lock = threading.Lock()
        self._models: dict[threading.Thread, Model] = {}

    def unload(self, model: Model) -> None:
        """The model takes no more requests: it answers those it has, and ends."""

        # Emptied by the thread, so that nothing holds the model when memory is given back.
        held = [model]
        del model

        def end() -> None:
            model = held.pop()
            model.batcher.close()
            self._registry.mark_unloaded(model)
            self._changed(model.name)
            with self._lock:
                model = self._models.pop(threading.current_thread())
            del model
            _give_memory_back()

        thread = threading.Thread(target=end, name=f"unload-{held[0].name}-{held[0].version}", daemon=True)
        with self._lock:
            self._models[thread] = held[0]
        thread.start()

    def drain(self, until: float) -> bool:
        """Waits for them, until a time of `time.monotonic`; whether all have ended."""
        with self._lock:
            models = list(self._models.values())
        ended = [model.batcher.drain(max(0.0, until - time.monotonic())) for model in models]
        return all(ended)

    def close(self, until: float) -> bool:
        """Ends them, whatever they have; whether that came about until a time of `time.monotonic`."""
        with self._lock:
            unloading = dict(self._models)
        for model in unloading.values():
            model.batcher.close(drain=False, timeout=0.0)
        for thread in unloading:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in unloading)


def _give_memory_back() -> None:
    """Has glibc return what a model has left free, which it else keeps: about as much again as the model."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
