"""Creation and warm-up of a model's sessions, when it is loaded and after a session has failed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from tensorferry.batcher.learning.calibration import calibrate
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.gpu.cuda_graphs import shapes_to_capture
from tensorferry.server.model_config.io_mapping import IoMapping
from tensorferry.server.model_config.settings import ModelSettings
from tensorferry.server.models.warmup_samples import WarmupSample
from tensorferry.server.runtime.fp16 import model_file
from tensorferry.server.runtime.host_memory import GrowthCheck, check_fits
from tensorferry.server.runtime.sampling import Array, random_inputs
from tensorferry.server.runtime.session import Session
from tensorferry.server.signature import TensorSpec
from tensorferry.server.telemetry.load_progress import set_load_stage

_log = logging.getLogger("tensorferry.server")

_Run = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """Warm-up runs of a session.

    `samples` are those of the model's configuration. `working_size` is as in `PreparedModel`. `padded_sizes` has the
    axis sizes of each padded length, or one empty mapping without padding. No batch has more than `max_rows`, because
    the queue holds no more rows.
    """

    samples: Sequence[WarmupSample]
    working_size: int | None
    padded_sizes: Sequence[Mapping[str, int]]
    max_rows: int


@dataclass(frozen=True, slots=True)
class SessionFactory:
    """Makes sessions of a model. It exists as long as the model, so it holds no session."""

    source: ModelSource
    io_mapping: IoMapping
    settings: ModelSettings
    warmup: WarmupPlan

    def capture(self, session: Session) -> list[int]:
        """Capture the requested CUDA graphs of a session; return the rows of their batches, empty without graphs."""
        graphs, settings = session.graphs, self.settings
        if graphs is None:
            return []
        shared = self.io_mapping.signature.shared_inputs(batched=settings.max_batch_size > 0)
        if shared:
            name = self.io_mapping.signature.inputs[min(shared)].name
            session.go_without_graphs(f"its input {name!r} has no batch axis")
            return []
        try:
            batch_shapes = shapes_to_capture(
                graphs, session.signature, settings.max_batch_size, self.warmup.padded_sizes
            )
        except StartError as error:
            session.go_without_graphs(str(error))
            return []
        # Padding rows are safe if requests may share a batch.
        if not session.capture(batch_shapes, pads=settings.merges):
            return []
        return sorted(
            {next(iter(shapes.values()))[0] if settings.max_batch_size else 1 for shapes in batch_shapes}
        )

    def warm_up(self, session: Session) -> list[dict[int, float]]:
        """Run the samples and batches of increasing size; return the seconds by number of rows, for each length."""
        run = self.io_mapping.runner(session.run)
        self._run_samples(run)
        return [self._run_sizes(run, sizes) for sizes in self.warmup.padded_sizes]

    def rebuild(self, device: str, *, runs: bool) -> Session:
        """Return a new session with captured graphs, warmed up; raise StartError if that fails.

        With `runs`, a session that runs no batch is a failure. A model in FP16 is converted again, because its converted
        file was deleted.
        """
        with ExitStack() as scratch:
            file = model_file(self.source.path, self.settings.ort_options.fp16, scratch)
            session = file.session(device, self.settings.ort_options)
        self.capture(session)
        if not any(self.warm_up(session)) and runs:
            raise StartError(f"model {self.source.name!r} no longer runs on {device}")
        return session

    def _run_samples(self, run: _Run) -> None:
        """Run the samples of the model's configuration; raise StartError if one fails."""
        for sample in self.warmup.samples:
            for _ in range(sample.count):
                try:
                    run(sample.inputs)
                except ModelFailedError as error:
                    raise StartError(
                        f"model {self.source.name!r}: failed to run warmup sample {sample.name!r}: {error}"
                    ) from error

    def _run_sizes(self, run: _Run, sizes: Mapping[str, int]) -> dict[int, float]:
        """Run and time batches of the sizes that `calibrate` selects.

        `sizes` are those of other dynamic axes, as in `random_inputs`. Returns the seconds by number of rows, ascending.
        Ends at a batch that fails, because random rows may fail. StartError if there is not enough memory for a batch.
        """
        size, seconds = self.warmup.working_size, dict[int, float]()
        if size is None:
            return seconds
        most = min(max(1, self.settings.max_batch_size), self.warmup.max_rows)
        memory = GrowthCheck()
        remedy = f"lower max_batch_size, which is {self.settings.max_batch_size}"
        row_bytes = sum(
            map(_min_row_bytes, self.io_mapping.signature.inputs + self.io_mapping.signature.outputs)
        )
        check_fits(
            f"model {self.source.name!r}: input and output of a batch of {most} rows",
            row_bytes * most,
            remedy,
        )

        def timed(rows: int) -> float:
            memory.check(f"model {self.source.name!r}: a batch of {rows} rows", remedy)
            set_load_stage(f"warming up with a batch of {rows} rows, of at most {most}")
            inputs = random_inputs(self.io_mapping.signature, rows, size, sizes=sizes)
            try:
                # The first run of a size is slower and not timed.
                run(inputs)
                return min(_timed(run, inputs) for _ in range(2))
            except ModelFailedError as error:
                name = self.source.name
                _log.warning(
                    "model %s: warm-up stopped at a batch of %d rows, which failed: %s", name, rows, error
                )
                raise

        with suppress(ModelFailedError):
            for rows, took in calibrate(timed, most):
                seconds[rows] = took
        return dict(sorted(seconds.items()))


def _min_row_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a row in which each dynamic dimension has one element."""
    return math.prod(dim for dim in spec.dims[1:] if isinstance(dim, int)) * spec.datatype.size


def _timed(run: _Run, inputs: Mapping[str, Any]) -> float:
    started = time.perf_counter()
    run(inputs)
    return time.perf_counter() - started
