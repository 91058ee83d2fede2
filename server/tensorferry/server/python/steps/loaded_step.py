"""A loaded step: everything about a model but its batcher."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from tensorferry.batcher import ControlTensor, Padding, RunTimedOut, SequenceLimits, StagedModel, StateTensor
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.models.config_pbtxt.pbtxt import BatchingDecision
from tensorferry.server.models.config_pbtxt.settings import ModelSettings
from tensorferry.server.processes.functions.worker_process import WorkerProcess
from tensorferry.server.runtime.axes import EmptyAxes
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.server.signature import Signature


class StepInstance(NamedTuple):
    """One instance of a step. One thread at a time runs it.

    `run` takes a whole batch, by input, and returns the outputs by name; of a Python function it also takes the rows of each
    request. `on_hang` sets what is called if a run does not end even after it was asked to. `staged` is the form in which copies to a device overlap with runs, if there is one.
    `close` ends what the instance started, such as a process, after its last run. `process` is the process that it runs
    in, if that is not the server's. `answers` replaces `run` for a function that yields. It takes the inputs, and a
    function that it calls with another one, which stops it when nobody reads.
    """

    run: Callable[..., Mapping[str, Any]]
    on_hang: Callable[[Callable[[RunTimedOut], None]], None]
    staged: StagedModel | None = None
    close: Callable[[], None] = lambda: None
    process: WorkerProcess | None = None
    answers: Callable[..., Generator[Mapping[str, Any], None, None]] | None = None


# Makes the instance of a number, counted from 0, which reports as the instance of an index. StartError if it cannot be made.
MakeInstance: TypeAlias = Callable[[int, InstanceHealth, int], StepInstance]


@dataclass(frozen=True, slots=True)
class DeclaredSequences:
    """The states of a model, its inputs that the server fills, and the bounds of its sequences."""

    states: tuple[StateTensor, ...]
    controls: tuple[ControlTensor, ...]
    limits: SequenceLimits


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """A model that is loaded and checked. `make_instance` is called once for each of the settings' devices.

    `batching` describes batching and padding to people. `run_seconds` has the seconds of runs by rows; `warmup` has those
    that hold for all requests. `steady` says that a run's time depends on the inputs' shapes alone. `python` says that the
    step is a Python function. `open_layout` says that the layout of the cores is to be measured (`--instances auto`), and
    `open_checks` that comparing its rows takes longer than a load may.
    `sequences` has the states that its requests hand on; `signature` is without them. `streams` says that a request has
    any number of answers. `impure` is why equal requests may get different answers, "" if they cannot.
    """

    name: str
    signature: Signature
    settings: ModelSettings
    config: ModelConfig
    decision: BatchingDecision
    batching: str
    make_instance: MakeInstance
    run_seconds: Mapping[int, float]
    warmup: Mapping[int, float] = field(default_factory=dict)
    padding: Padding | None = None
    empty_axes: EmptyAxes = field(default_factory=EmptyAxes)
    steady: bool = False
    python: bool = False
    open_layout: bool = False
    open_checks: bool = False
    sequences: DeclaredSequences | None = None
    streams: bool = False
    impure: str = ""
