"""Creation and warm-up of a model's sessions, when it is loaded and after a session has failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.gpu.cuda_graphs import shapes_to_capture
from tensorferry.server.model_config.io_mapping import IoMapping
from tensorferry.server.model_config.settings import ModelSettings
from tensorferry.server.onnx_models.warmup_samples import WarmupSample
from tensorferry.server.runtime.fp16 import model_file
from tensorferry.server.runtime.sampling import Array, random_inputs
from tensorferry.server.runtime.session import Session
from tensorferry.server.steps.batch_times import batch_times

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
            file = model_file(self.source.path, self.settings.ort_options, scratch)
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
        """Run and time batches of random rows, as in `batch_times`.

        `sizes` are those of other dynamic axes, as in `random_inputs`.
        """
        size, signature = self.warmup.working_size, self.io_mapping.signature
        if size is None:
            return {}
        max_batch_size = self.settings.max_batch_size
        return batch_times(
            self.source.name,
            signature,
            run,
            lambda rows: random_inputs(signature, rows, size, sizes=sizes),
            min(max(1, max_batch_size), self.warmup.max_rows),
            max_batch_size,
        )
