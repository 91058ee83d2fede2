"""What a model function may offer beside being called: memory for its batches, and copying apart from running."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tensorferry.batcher.request import Array


@runtime_checkable
class StagedModel(Protocol):
    """A model function in steps. Each batch goes through them in order, in one thread, except after one that raises.

    What a step raises says what happened, as what a function raises does (see `errors`). While one batch is in `__call__`, others may be in any of the other steps, on other threads.
    """

    def place(
        self, tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
    ) -> Mapping[str, Array] | None:
        """Arrays to be filled with a batch whose tensors have these dtypes and shapes; None: the caller has its own."""

    def load(self, batch: Any) -> Any:
        """What is done with a batch before it is its turn; what this returns is what is called with."""

    def __call__(self, batch: Any) -> Any:
        """Runs the batch."""

    def fetch(self, outputs: Any) -> Any:
        """Makes of what the call returned what a model function returns."""
