"""Warm-up: runs and times batches of the sizes from which the batcher learns what a batch takes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tensorferry.batcher.learning.calibration import calibrate
from tensorferry.server.errors import ModelFailedError
from tensorferry.server.runtime.host_memory import GrowthCheck, check_fits
from tensorferry.server.runtime.sampling import Array
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.server.telemetry.load_progress import set_load_stage

_log = logging.getLogger("tensorferry.server")


def batch_times(
    name: str,
    signature: Signature,
    run: Callable[[Mapping[str, Array]], Any],
    inputs_of: Callable[[int], Mapping[str, Array]],
    most_rows: int,
    max_batch_size: int,
) -> dict[int, float]:
    """Run and time batches of the sizes that `calibrate` selects, at most `most_rows`; return seconds by rows, ascending.

    `inputs_of` returns inputs with a number of rows. Ends at a batch that fails, because such rows may fail. StartError if
    there is not enough memory for a batch of `max_batch_size`, the model's setting.
    """
    seconds = dict[int, float]()
    memory = GrowthCheck()
    remedy = f"lower max_batch_size, which is {max_batch_size}"
    row_bytes = sum(map(_min_row_bytes, signature.inputs + signature.outputs))
    check_fits(
        f"model {name!r}: input and output of a batch of {most_rows} rows", row_bytes * most_rows, remedy
    )

    def timed(rows: int) -> float:
        memory.check(f"model {name!r}: a batch of {rows} rows", remedy)
        set_load_stage(f"warming up with a batch of {rows} rows, of at most {most_rows}")
        inputs = inputs_of(rows)
        try:
            # The first run of a size is slower and not timed.
            run(inputs)
            return min(_timed(run, inputs) for _ in range(2))
        except ModelFailedError as error:
            _log.warning(
                "model %s: warm-up stopped at a batch of %d rows, which failed: %s", name, rows, error
            )
            raise

    with suppress(ModelFailedError):
        for rows, took in calibrate(timed, most_rows):
            seconds[rows] = took
    return dict(sorted(seconds.items()))


def _min_row_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a row in which each dynamic dimension has one element."""
    return math.prod(dim for dim in spec.dims[1:] if isinstance(dim, int)) * spec.datatype.size


def _timed(run: Callable[[Mapping[str, Any]], Any], inputs: Mapping[str, Any]) -> float:
    started = time.perf_counter()
    run(inputs)
    return time.perf_counter() - started
