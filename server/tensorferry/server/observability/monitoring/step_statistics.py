"""Statistics of the stages of pipelines, and of the steps of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensorferry.batcher import BatcherSettings, BatcherStatistics, Pipeline
from tensorferry.server.models.lifecycle.model import Model, ModelStep


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The batches that a step has run, and the seconds of these runs."""

    step: ModelStep
    batches: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StageCounts:
    """A stage of a pipeline that has a batcher of its own: its settings, the device of each instance, and its statistics."""

    name: str
    settings: BatcherSettings
    devices: Sequence[str]
    counts: BatcherStatistics


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """A model with its statistics, and those of its stages.

    `stages` is empty unless the model is a pipeline of several stages. It has none that another model of the server runs.
    """

    model: Model
    counts: BatcherStatistics
    stages: Sequence[StageCounts] = ()

    @property
    def of_batchers(self) -> Sequence[BatcherStatistics]:
        """The statistics of each batcher that runs batches of the model."""
        if isinstance(self.model.batcher, Pipeline):
            return [stage.counts for stage in self.stages]
        return [self.counts]

    def steps(self) -> Iterator[StepCounts]:
        """Yield the counts of each step, except those that other models run."""
        steps, several = self.model.steps, isinstance(self.model.batcher, Pipeline)
        of_stages = {stage.name: stage.counts for stage in self.stages}
        for step in steps:
            counts = of_stages.get(step.stage) if several else self.counts
            if counts is None:
                continue
            if sum(other.stage == step.stage for other in steps) == 1:
                # Its batches are those of the stage.
                yield StepCounts(step, counts.batches, counts.compute_time_sum)
            else:
                times = step.times
                yield StepCounts(step, sum(one.batches for one in times), sum(one.seconds for one in times))


def counts_of(model: Model) -> ModelCounts:
    """Return the statistics of a model. Those of each stage are from one moment."""
    batcher = model.batcher
    if not isinstance(batcher, Pipeline):
        return ModelCounts(model, batcher.statistics())
    by_name = batcher.stage_statistics()
    devices = _devices_of_stages(model)
    stages = [
        StageCounts(stage.name, stage.own.batcher.settings, devices.get(stage.name, ()), by_name[stage.name])
        for stage in batcher.stages
        if stage.own is not None
    ]
    return ModelCounts(model, batcher.statistics(), stages)


def _devices_of_stages(model: Model) -> Mapping[str, Sequence[str]]:
    """Return the devices of each stage: the model has those of all its instances, in the order of the stages."""
    found: dict[str, Sequence[str]] = {}
    first = 0
    for step in model.steps:
        if step.stage not in found:
            found[step.stage] = model.devices[first : first + len(step.times)]
            first += len(step.times)
    return found
