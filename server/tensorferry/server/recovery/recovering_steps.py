"""An instance that survives its device, in steps: a batch may be loaded when the session that it lies in has failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.batcher import StagedModel
from tensorferry.server.errors import ModelFailedError
from tensorferry.server.recovery.recovering_instance import RecoveringInstance


class _LoadedBatch(NamedTuple):
    """A batch in a session's memory, or the outputs of one, and what that memory is used by."""

    steps: StagedModel
    batch: Any


class RecoveringStagedModel:
    """`StagedModel`, by the steps of whatever session the instance has; without one, batches are the batcher's own.

    Raises as `RecoveringInstance.run` does.
    """

    def __init__(self, survivor: RecoveringInstance) -> None:
        self._survivor = survivor

    def place(
        self, tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
    ) -> Mapping[str, npt.NDArray[Any]] | None:
        """Arrays in memory that the device copies from."""
        steps = self._survivor.steps
        return None if steps is None else steps.place(tensors)

    def load(self, batch: Any) -> Any:
        """Copies to the device."""
        steps = self._survivor.steps
        if steps is None:
            return batch
        try:
            return _LoadedBatch(steps, steps.load(batch))
        except ModelFailedError as error:
            raise self._survivor.copy_failure(error, steps) from None

    def __call__(self, batch: Any) -> Any:
        """Runs on the device."""
        if not isinstance(batch, _LoadedBatch):
            return self._survivor.run(batch)
        if batch.steps is not self._survivor.steps:
            # Its arrays are still there, its place on the device is another session's.
            return self._survivor.run(dict(batch.batch))
        return _LoadedBatch(batch.steps, self._survivor.run(batch.batch, batch.steps))

    def fetch(self, outputs: Any) -> Any:
        """Copies from the device."""
        if not isinstance(outputs, _LoadedBatch):
            return outputs
        try:
            return outputs.steps.fetch(outputs.batch)
        except ModelFailedError as error:
            raise self._survivor.copy_failure(error, outputs.steps) from None
