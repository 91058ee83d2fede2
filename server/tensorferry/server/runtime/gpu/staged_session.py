"""Session split into steps, so that the batcher can copy one batch while another one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.server.runtime.gpu.staging_buffers import StagedBatch, StagingBuffers, host_arrays
from tensorferry.server.runtime.gpu.tensor_layout import Shape
from tensorferry.server.signature import Signature

Array = npt.NDArray[Any]

_NO_STATES: Mapping[str, str] = {}


class StagedSession:
    """`StagedModel` of a session. A batch in its staging buffers runs step by step, any other at once by `run`.

    `failed` converts an exception of a step into the batcher's.
    """

    def __init__(
        self,
        signature: Signature,
        staging: StagingBuffers,
        run: Callable[[Mapping[str, Array]], dict[str, Array]],
        failed: Callable[[Exception], Exception],
    ) -> None:
        self._dtypes = {spec.name: spec.datatype.storage for spec in signature.inputs}
        self._staging = staging
        self._run = run
        self._failed = failed

    def place(
        self, tensors: Mapping[str, tuple[np.dtype[Any], Shape]], states: Mapping[str, str] = _NO_STATES
    ) -> StagedBatch | None:
        """Return arrays in memory that the device can copy from directly, or None; for `states` as in `StagingBuffers`."""
        for name, (dtype, _) in tensors.items():
            if self._dtypes.get(name) != dtype:
                return None
        return self._staging.place({name: shape for name, (_, shape) in tensors.items()}, states)

    def load(self, batch: Any) -> Any:
        """Copy a batch to the device."""
        if isinstance(batch, StagedBatch):
            self._step(self._staging.load, batch)
        return batch

    def __call__(self, batch: Any) -> Any:
        """Run the model on a loaded batch."""
        if not isinstance(batch, StagedBatch):
            return self._run(batch)
        if batch.slot is None:
            # The memory of a state may be lost.
            return self._run(self._step(host_arrays, batch))
        return self._step(self._staging.compute_or_repeat, batch)

    def fetch(self, outputs: Any) -> Any:
        """Copy the outputs from the device."""
        return self._step(self._staging.fetch, outputs) if isinstance(outputs, StagedBatch) else outputs

    def _step(self, step: Callable[[StagedBatch], Any], batch: StagedBatch) -> Any:
        try:
            return step(batch)
        except Exception as error:
            raise self._failed(error) from error
