"""Unloading of models: of each after it has answered its accepted requests, and of all when the server ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from tensorferry.batcher import StatefulBatcher
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.system import malloc
from tensorferry.server.system.threads import ThreadKind, new_thread

# How long a thread waits before it looks again whether other models, or sequences, need the model.
_IDLE_SECONDS = 0.1


class ModelUnloader:
    """Unloads models that accept no more requests, each on its own thread. Thread-safe.

    `changed` is called with a model's name after it was unloaded. Sequences that live may go on for `sequence_seconds`.
    """

    def __init__(
        self, registry: ModelRegistry, changed: Callable[[str], None], sequence_seconds: float = 0.0
    ) -> None:
        self._registry = registry
        self._sequence_seconds = sequence_seconds
        self._changed = changed
        # Guards _models. No waiting while it is held.
        self._lock = threading.Lock()
        # Each unloading thread with its model, and with None once the model has answered. The entry is removed after the
        # thread's last reference to the model, so that `close` returns after the model's files and memory are free.
        self._models: dict[threading.Thread, Model | None] = {}
        # No thread waits for requests of other models any more.
        self._closing = threading.Event()

    def unload(self, model: Model) -> None:
        """Start to unload a model that accepts no more requests; it answers those that it has accepted."""

        # The thread empties this list, so that no reference to the model is left when memory is released.
        held = [model]
        del model

        def end() -> None:
            model, thread = held.pop(), threading.current_thread()
            self._await_users(model)
            self._await_sequences(model)
            self._registry.forget_retired(model)
            model.batcher.close()
            model.release()
            self._registry.mark_unloaded(model)
            self._changed(model.name)
            with self._lock:
                self._models[thread] = None
            del model
            # Otherwise glibc keeps about as much as the model used.
            malloc.give_back()
            with self._lock:
                del self._models[thread]

        thread = new_thread(f"unload-{held[0].name}-{held[0].version}", end, ThreadKind.EXPENDABLE)
        with self._lock:
            self._models[thread] = held[0]
            # Here, because `close` joins the threads that it sees, and one that has not started cannot be joined.
            thread.start()

    def _await_users(self, model: Model) -> None:
        """Wait until no accepted request of another model needs this one for a step. New ones are not accepted."""
        for user in reversed(self._registry.users(model.name)):
            while self._registry.needs(user, model) and not self._closing.is_set():
                if user.batcher.wait_idle(_IDLE_SECONDS):
                    break

    def _await_sequences(self, model: Model) -> None:
        """Wait until no sequence of the model lives, or their time is over."""
        until = time.monotonic() + self._sequence_seconds
        while (
            isinstance(model.batcher, StatefulBatcher)
            and model.batcher.sequence_statistics().living
            and time.monotonic() < until
        ):
            if self._closing.wait(_IDLE_SECONDS):
                return

    def models(self) -> Sequence[Model]:
        """Return the models that may still have requests."""
        with self._lock:
            return [model for model in self._models.values() if model is not None]

    def drain(self, until: float) -> bool:
        """Wait until all models have answered their requests, at most until a monotonic time; return whether they have."""
        ended = [model.batcher.drain(max(0.0, until - time.monotonic())) for model in self.models()]
        return all(ended)

    def close(self, until: float) -> bool:
        """End all models, failing their requests; return whether they ended until a monotonic time."""
        self._closing.set()
        with self._lock:
            unloading = dict(self._models)
        for model in unloading.values():
            if model is not None:
                model.batcher.close(drain=False, timeout=0.0)
        for thread in unloading:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in unloading)


def wait_until_idle(models: Sequence[Model], until: float) -> bool:
    """Wait until no model has a request, at most until a monotonic time; return whether that is so.

    New requests are only those that models' functions and pipelines make for accepted ones. From now on no batch waits for
    more requests, so that all of these end sooner.
    """
    for model in models:
        model.batcher.flush()
    before = -1
    # Each model was idle at some time of a pass. If none accepted anything during the pass, all are idle at its end.
    while (accepted := sum([model.batcher.statistics().accepted for model in models])) != before:
        before = accepted
        for model in models:
            if not model.batcher.wait_idle(max(0.0, until - time.monotonic())):
                return False
    return True
