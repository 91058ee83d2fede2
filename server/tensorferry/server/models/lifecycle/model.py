"""A loaded version of a model, and its steps: what a server knows of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorferry.batcher import AnswerCache, Batcher, Padding, Pipeline, Request, StageModel
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.observability.logs.exemplars import Exemplars
from tensorferry.server.processes.functions.worker_process import WorkerProcess
from tensorferry.server.python.steps.named_model import ModelReference, stage_model
from tensorferry.server.python.steps.stage_function import StepTimes
from tensorferry.server.runtime.axes import EmptyAxes
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.server.signature import Signature
from tensorferry.serving.text_tasks import TextTask


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A step of a model: a Python function ("python"), an ONNX model ("onnx") or another model of the server ("model").

    `stage` is the name of the stage whose batches it runs. `inputs` and `outputs` map its names to the model's tensors.
    `times` has what each instance ran; it is empty if the batcher of the stage knows that alone. `processes` are those that
    the instances of a function run in, if they do not run in the server's.
    """

    name: str
    kind: str
    stage: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    times: tuple[StepTimes, ...] = field(default=(), compare=False)
    processes: tuple[WorkerProcess, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded version of a model. If `max_batch_size` is 0, requests have no batch axis, and each runs alone.

    `batching` describes batching to people; `batching_verdict` is as in `BatchingDecision`. `slo` limits the time of
    every request, in seconds; inf is no limit. `padding` lets requests of different lengths share a batch. `config` is
    the completed configuration. `labels` are class names by output. `devices` has the device of each instance, `health`
    their state. `exemplars` collects traced requests for the metrics; None without metrics. `empty_axes` says which axes
    of a request may have length zero. `steps` describes what a batch runs through, and `uses` has the other models that its
    steps name. `release` ends what its instances started, after the batcher is closed. `task` is what it does with texts.
    `stage` is how steps of other models run this one. If it `streams`, a request has any number of answers.
    `cache` keeps answers, if any are kept. `open_layout` is its source if its layout of the cores is to be measured,
    `open_checks` if comparing its rows takes longer than a load may.
    """

    name: str
    version: str
    signature: Signature
    max_batch_size: int
    batching: str
    batcher: Batcher | Pipeline
    slo: float = math.inf
    padding: Padding | None = None
    config: ModelConfig = field(default_factory=ModelConfig, compare=False)
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    health: InstanceHealth = field(default_factory=InstanceHealth, compare=False)
    exemplars: Exemplars | None = field(default=None, compare=False)
    empty_axes: EmptyAxes = field(default_factory=EmptyAxes)
    batching_verdict: str = "off"
    steps: tuple[ModelStep, ...] = ()
    uses: tuple[ModelReference, ...] = ()
    release: Callable[[], None] = field(default=lambda: None, compare=False)
    task: TextTask | None = None
    streams: bool = False
    cache: AnswerCache | None = None
    open_layout: ModelSource | None = field(default=None, compare=False, repr=False)
    open_checks: ModelSource | None = field(default=None, compare=False, repr=False)
    stage: StageModel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stage = stage_model(
            self.name,
            self.batcher,
            self.padding,
            self.signature,
            self.empty_axes,
            batched=self.batched,
            # An ONNX model by itself has no steps.
            divides=not self.steps or any(step.kind == "onnx" for step in self.steps),
        )
        object.__setattr__(self, "stage", stage)

    @property
    def batched(self) -> bool:
        """Whether axis 0 counts rows."""
        return self.max_batch_size > 0

    def misfit(self, used: ModelReference) -> str:
        """Return why the model cannot run the steps that have this reference; "" if it can."""
        return used.incompatibility(self.signature, self.batcher, batched=self.batched)

    def enqueue(self, request: Request, *, notify: bool = True) -> bool:
        """Accept a request of a client; see `Batcher.enqueue`."""
        return (self.cache or self.batcher).enqueue(request, notify=notify)

    def cancel(self, request: Request) -> bool:
        """Withdraw a request of a client; see `Batcher.cancel`."""
        return self.batcher.cancel(request)

    def __str__(self) -> str:
        return f"{self.name}{self.signature}, {self.batching}"
