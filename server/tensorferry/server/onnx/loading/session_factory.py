"""Creation and warm-up of a model's sessions, when it is loaded and after a session has failed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tensorferry.batcher.learning.paying_rows import powers_of_two
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.models.config_pbtxt.io_mapping import IoMapping
from tensorferry.server.models.config_pbtxt.settings import ModelSettings
from tensorferry.server.observability.logs.load_progress import set_load_stage
from tensorferry.server.onnx.loading.warmup_samples import WarmupSample
from tensorferry.server.runtime.checks.sampling import Run, random_inputs
from tensorferry.server.runtime.files.file_record import FileRecord
from tensorferry.server.runtime.files.fp16 import ModelFile, model_file
from tensorferry.server.runtime.gpu.cuda_graphs import shapes_to_capture
from tensorferry.server.runtime.session import Session

_log = logging.getLogger("tensorferry.server")


@dataclass(frozen=True, slots=True)
class SessionFactory:
    """Makes sessions of a model, and warms them up. It exists as long as the model, so it holds no session.

    `samples` are those of the model's configuration. `working_size` is as in `PreparedModel`. `padded_sizes` has the
    axis sizes of each padded length, or one empty mapping without padding. No batch has more than `max_rows`, because
    the queue holds no more rows. `files` is as in `PreparedModel`.
    """

    source: ModelSource
    io_mapping: IoMapping
    settings: ModelSettings
    samples: Sequence[WarmupSample]
    working_size: int | None
    padded_sizes: Sequence[Mapping[str, int]]
    max_rows: int
    files: FileRecord

    def session(self, file: ModelFile, device: str) -> Session:
        """Return a new session of the model's file on a device. StartError if that fails."""
        session = file.session(device, self.settings.ort_options)
        if self.settings.merges:
            session.limit_memory()
        return session

    def capture(self, session: Session) -> list[int]:
        """Capture the requested CUDA graphs of a session; return the rows of their batches, empty without graphs."""
        graphs, settings = session.graphs, self.settings
        if graphs is None:
            return []
        try:
            if shared := self.io_mapping.signature.shared_inputs(batched=settings.max_batch_size > 0):
                name = self.io_mapping.signature.inputs[min(shared)].name
                raise StartError(f"its input {name!r} has no batch axis")
            batch_shapes = shapes_to_capture(
                graphs, session.signature, settings.max_batch_size, self.padded_sizes
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

    def warm_up(self, session: Session, *, ran: bool = False) -> bool:
        """Run the samples and, unless a row `ran`, a row; return whether it ran. With TensorRT, run all sizes."""
        run = self.io_mapping.runner(session.run)
        self._run_samples(run)
        most = min(max(1, self.settings.max_batch_size), self.max_rows)
        if session.builds_engines:
            # Otherwise the first requests of a size would wait for its engine.
            return all(self._runs(run, powers_of_two(most), sizes) for sizes in self.padded_sizes)
        return ran or self._runs(run, (1,), self.padded_sizes[0])

    def rebuild(self, device: str, *, runs: bool) -> Session:
        """Return a new session with captured graphs, warmed up; raise StartError if that fails.

        With `runs`, a session that runs no batch is a failure. Files that have changed since the load are one too, because
        the signature and the verdict are those of the old files. A model in FP16 is converted again, because its converted
        file was deleted.
        """
        with ExitStack() as scratch:
            file = model_file(self.source.path, self.settings.ort_options, scratch)
            session = self.session(file, device)
        # Afterwards, because they may change while the session is made.
        if self.files.has_changed():
            raise StartError(f"{self.source.path}: its files have changed since it was loaded; load it again")
        self.capture(session)
        if not self.warm_up(session) and runs:
            raise StartError(f"model {self.source.name!r} no longer runs on {device}")
        return session

    def _run_samples(self, run: Run) -> None:
        for sample in self.samples:
            for _ in range(sample.count):
                try:
                    run(sample.inputs)
                except ModelFailedError as error:
                    raise StartError(
                        f"model {self.source.name!r}: failed to run warmup sample {sample.name!r}: {error}"
                    ) from error

    def _runs(self, run: Run, sizes: Sequence[int], axes: Mapping[str, int]) -> bool:
        """Run batches of random rows, until one fails, as such rows may; return whether one ran.

        `axes` has the sizes of other dynamic axes, as in `random_inputs`.
        """
        size, signature = self.working_size, self.io_mapping.signature
        if size is None:
            return False
        for rows in sizes:
            set_load_stage(f"warming up with a batch of {rows} rows, of at most {sizes[-1]}")
            try:
                run(random_inputs(signature, rows, size, sizes=axes))
            except ModelFailedError as error:
                _log.warning(
                    "model %s: warm-up stopped at a batch of %d rows, which failed: %s",
                    self.source.name,
                    rows,
                    error,
                )
                return rows > 1
        return True
