"""A session in steps, for a batcher that has one batch copied while another runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.server.gpu.staging_buffers import StagedBatch, StagingBuffers
from tensorferry.server.gpu.tensor_layout import Shape
from tensorferry.server.signature import Signature

Array = npt.NDArray[Any]


class StagedSession:
    """`StagedModel`: batches that lie in the session's memory go step by step, others are run at once, by `run`.

    `compute` runs one that is loaded; `failed` makes of what a step raised what the batcher gets.
    """

    def __init__(
        self,
        signature: Signature,
        staging: StagingBuffers,
        compute: Callable[[StagingBuffers, StagedBatch], StagedBatch],
        run: Callable[[Mapping[str, Array]], dict[str, Array]],
        failed: Callable[[Exception], Exception],
    ) -> None:
        self._dtypes = {spec.name: spec.datatype.storage for spec in signature.inputs}
        self._staging = staging
        self._compute = compute
        self._run = run
        self._failed = failed

    def place(self, tensors: Mapping[str, tuple[np.dtype[Any], Shape]]) -> StagedBatch | None:
        """Arrays in memory that the device copies from."""
        for name, (dtype, _) in tensors.items():
            if self._dtypes.get(name) != dtype:
                return None
        return self._staging.place({name: shape for name, (_, shape) in tensors.items()})

    def load(self, batch: Any) -> Any:
        """Copies to the device."""
        if isinstance(batch, StagedBatch):
            try:
                self._staging.load(batch)
            except Exception as error:
                raise self._failed(error) from error
        return batch

    def __call__(self, batch: Any) -> Any:
        """Runs on the device."""
        if not isinstance(batch, StagedBatch) or batch.slot is None:
            return self._run(batch)
        try:
            return self._compute(self._staging, batch)
        except Exception as error:
            raise self._failed(error) from error

    def fetch(self, outputs: Any) -> Any:
        """Copies from the device."""
        if not isinstance(outputs, StagedBatch):
            return outputs
        try:
            return self._staging.fetch(outputs)
        except Exception as error:
            raise self._failed(error) from error
