"""Optional steps of a model function: memory for its batches, and copies apart from the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tensorferry.batcher.request import Array


@runtime_checkable
class StagedModel(Protocol):
    """A model function in steps: `place`, `load`, call, `fetch`.

    Each batch goes through them in this order, on one thread, until one raises. Errors mean what they mean when a
    function raises them (see `errors`). While one batch is in `__call__`, other threads may be in the other steps.
    """

    def place(
        self, tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
    ) -> Mapping[str, Array] | None:
        """Return arrays for a batch whose tensors have these dtypes and shapes; None if the batcher allocates them."""

    def load(self, batch: Any) -> Any:
        """Prepare a batch before the device is free; the result is the argument of the call."""

    def __call__(self, batch: Any) -> Any:
        """Run the batch."""

    def fetch(self, outputs: Any) -> Any:
        """Turn the result of the call into what a model function returns."""
