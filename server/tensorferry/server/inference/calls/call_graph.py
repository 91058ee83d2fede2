"""Which models call which others, so that no models ever wait for each other in a circle."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tensorferry.server.models.lifecycle.registry import ModelRegistry


class CallGraph:
    """The calls between models that were seen, and the steps of pipelines that name other models. Thread-safe.

    While a function waits for the model that it called, one of its model's instances runs nothing else. If all instances of
    each model in a circle waited for the next one, none would ever go on. Therefore a call that would close a circle is
    refused. Then some waiting model's call is always of a model that waits for none, so it is answered and all others after
    it. This holds for any number of instances, and however requests share batches.

    A call counts even after its end, so that models that call each other fail always, not only while both are busy.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        # The steps of pipelines that name other models, and the registry's generation that they belong to. Replaced together.
        self._steps: tuple[int, Mapping[str, Sequence[str]]] = (-1, {})
        # Guards _calls. Nothing is called while it is held.
        self._lock = threading.Lock()
        # How many calls are open, by the calling and the called model. 0 if there were some.
        self._calls: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))

    def begin(self, caller: str, called: str) -> None:
        """Note a call. RecursionError if the called model waits, or may wait, for the caller."""
        steps = self._named_steps()
        with self._lock:
            path = self._path_locked(called, caller, steps)
            if path is None:
                self._calls[caller][called] += 1
                return
        chain = " -> ".join(map(repr, (caller, *path)))
        raise RecursionError(
            f"model {caller!r} called model {called!r}, which would wait for it: {chain}; models that call each other can "
            "wait forever: let one of them return what the other needs"
        )

    def end(self, caller: str, called: str) -> None:
        """Note the end of a call."""
        with self._lock:
            self._calls[caller][called] -= 1

    def forget(self, caller: str) -> None:
        """Forget the calls of a model that have ended: its function may have been replaced."""
        with self._lock:
            for called in [called for called, count in self._calls[caller].items() if not count]:
                del self._calls[caller][called]

    def _path_locked(self, start: str, goal: str, steps: Mapping[str, Sequence[str]]) -> Sequence[str] | None:
        """Return the models from `start` to `goal`, each of which waits for the next; None if there is no such way."""
        paths: dict[str, tuple[str, ...]] = {start: (start,)}
        left = [start]
        while left:
            name = left.pop()
            if name == goal:
                return paths[name]
            for later in (*self._calls.get(name, ()), *steps.get(name, ())):
                if later not in paths:
                    paths[later] = (*paths[name], later)
                    left.append(later)
        return None

    def _named_steps(self) -> Mapping[str, Sequence[str]]:
        generation = self._registry.generation
        known, steps = self._steps
        if known != generation:
            found: defaultdict[str, list[str]] = defaultdict(list)
            for model in self._registry.models():
                found[model.name] += [used.name for used in model.uses]
            steps = found
            self._steps = generation, steps
        return steps
