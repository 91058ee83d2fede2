"""A model function on its device, and what its workers and whoever watches it know of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tensorferry.batcher.execution.staged_model import StagedModel
from tensorferry.batcher.request import Request


class Instance:
    """A model function on its device, run by one worker, or by two in turn when `pipelined`.

    With `divisible` a request of several rows may be run in parts.
    """

    def __init__(
        self,
        index: int,
        model_fn: Callable[[Any], Any],
        *,
        batched: bool,
        pipelined: bool,
        divisible: bool = False,
    ) -> None:
        self.index = index
        self.model_fn = model_fn
        self.staged = model_fn if isinstance(model_fn, StagedModel) else None
        self.batched = batched
        self.pipelined = pipelined
        self.divisible = divisible
        # Held by the worker whose batch the device runs; where there is one, nobody ever waits for it. Nothing but the model
        # function is called while it is held.
        self.turn = threading.Lock()
        # The batches that its workers have taken and not completed.
        self.in_hand: list[Sequence[Request]] = []
        # What the model function runs now. Written by the worker whose turn it is.
        self.running: Sequence[Request] | None = None
        # What brings the function back, while it is broken: it is not called until then. Written by the
        # worker whose turn it is, and by the one that brings it back.
        self.recover: Callable[[], None] | None = None
        # Somebody has ended what it runs, since it does not return; nothing else runs until it does.
        # Written by that somebody, before a look at `running`, and by the worker after `running`: so
        # one of them at least sees that it is over.
        self.given_up = False
        # A worker of it has ended unexpectedly, and nobody has said since that it works again. Written by its
        # workers.
        self.fallen = False
