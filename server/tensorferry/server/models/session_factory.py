"""A model's blueprint: how its sessions are made and warmed up, when it is loaded and again when one has failed."""

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
class SessionFactory:
    """It lives as long as the model, and so holds none of its sessions.

    `size` is as in `Prepared`, `lengths` has the sizes that are padded to, or nothing but an empty one. No batch has
    more than `most_rows`, whatever `max_batch_size` allows: the queue holds no more.
    """

    source: ModelSource
    io_mapping: IoMapping
    settings: ModelSettings
    size: int | None
    samples: Sequence[WarmupSample]
    lengths: Sequence[Mapping[str, int]]
    most_rows: int

    def capture(self, session: Session) -> list[int]:
        """Captures the CUDA graphs that are wanted of a session; the rows of their batches, if that could be done."""
        graphs, settings = session.graphs, self.settings
        if graphs is None:
            return []
        shared = self.io_mapping.signature.shared_inputs(batched=settings.max_batch_size > 0)
        if shared:
            name = self.io_mapping.signature.inputs[min(shared)].name
            session.go_without_graphs(f"its input {name!r} has no batch axis")
            return []
        try:
            rungs = shapes_to_capture(graphs, session.signature, settings.max_batch_size, self.lengths)
        except StartError as error:
            session.go_without_graphs(str(error))
            return []
        # Rows of their own beside a request's are safe where requests may share a batch.
        if not session.capture(rungs, pads=settings.merges):
            return []
        return sorted({next(iter(shapes.values()))[0] if settings.max_batch_size else 1 for shapes in rungs})

    def warm_up(self, session: Session) -> list[dict[int, float]]:
        """Runs the samples, and batches of all sizes: by length, the seconds that they took by their rows."""
        run = self.io_mapping.runner(session.run)
        self._run_samples(run)
        return [self._run_sizes(run, sizes) for sizes in self.lengths]

    def rebuild(self, device: str, *, runs: bool) -> Session:
        """A session like those that the model was loaded with, captured and warm; StartError when there is none.

        With `runs` one that does not run at all, as it did then, is none. A model in FP16 is converted again: its
        converted file is gone.
        """
        with ExitStack() as scratch:
            file = model_file(self.source.path, self.settings.session.fp16, scratch)
            session = file.session(device, self.settings.session)
        self.capture(session)
        if not any(self.warm_up(session)) and runs:
            raise StartError(f"model {self.source.name!r} does not run on {device} any more")
        return session

    def _run_samples(self, run: _Run) -> None:
        """Runs the samples of the model's configuration; StartError for one that fails."""
        for given in self.samples:
            for _ in range(given.count):
                try:
                    run(given.inputs)
                except ModelFailedError as error:
                    raise StartError(
                        f"model {self.source.name!r}: failed to run warmup sample {given.name!r}: {error}"
                    ) from error

    def _run_sizes(self, run: _Run, sizes: Mapping[str, int]) -> dict[int, float]:
        """Runs batches of the sizes that `calibrate` wants, and times them.

        `sizes` are of the other dimensions that vary, as in `random_inputs`. Returns the seconds by the rows, ascending; it
        ends at a batch that fails, as random rows may. StartError where the memory for a batch is not there.
        """
        if self.size is None:
            return {}
        size, seconds = self.size, dict[int, float]()
        most = min(max(1, self.settings.max_batch_size), self.most_rows)
        memory = GrowthCheck()
        cure = f"lower max_batch_size, which is {self.settings.max_batch_size}"
        known = sum(map(_known_bytes, self.io_mapping.signature.inputs + self.io_mapping.signature.outputs))
        check_fits(
            f"model {self.source.name!r}: input and output of a batch of {most} rows", known * most, cure
        )

        def timed(rows: int) -> float:
            memory.check(f"model {self.source.name!r}: a batch of {rows} rows", cure)
            set_load_stage(f"warming up with a batch of {rows} rows, of at most {most}")
            inputs = random_inputs(self.io_mapping.signature, rows, size, sizes=sizes)
            try:
                # The first run of a size is slow.
                run(inputs)
                return min(_timed(run, inputs) for _ in range(2))
            except ModelFailedError as error:
                name = self.source.name
                _log.warning("model %s: warm-up ended at a batch of %d rows: %s", name, rows, error)
                raise

        with suppress(ModelFailedError):
            for rows, took in calibrate(timed, most):
                seconds[rows] = took
        return dict(sorted(seconds.items()))


def _known_bytes(spec: TensorSpec) -> int:
    """Bytes of a row, where each dimension that varies has one element."""
    return math.prod(dim for dim in spec.dims[1:] if isinstance(dim, int)) * spec.datatype.size


def _timed(run: _Run, inputs: Mapping[str, Any]) -> float:
    started = time.perf_counter()
    run(inputs)
    return time.perf_counter() - started
