"""Loading of a Python function: a trial run that checks its declaration, the batching check if asked for, and warm-up."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from tensorferry.protos.model_config_pb2 import ModelConfig, ModelInstanceGroup
from tensorferry.server.batching_check.row_comparison import (
    ComparisonOutcome,
    ComparisonSettings,
    compare_rows,
)
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import ModelFailedError, NotReadyError, StartError
from tensorferry.server.functions.call import Call, bound_call
from tensorferry.server.functions.failure import traceback_text
from tensorferry.server.model_config.instance_groups import InstanceGroup
from tensorferry.server.model_config.pbtxt import PYTHON, BatchingDecision, complete_config
from tensorferry.server.model_config.settings import settings_of
from tensorferry.server.python_models.configured import check_tensors, configured, configured_decision
from tensorferry.server.python_models.instance import (
    BatchCall,
    FunctionInstance,
    checked_call,
)
from tensorferry.server.python_models.outputs import RaggedRows, WrongOutputs
from tensorferry.server.python_models.signature import signature_of_function
from tensorferry.server.recovery.instance_health import InstanceHealth
from tensorferry.server.recovery.watchdog import RunLimits, Watchdog
from tensorferry.server.refused_requests import RefusedRequests
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.sampling import Array, random_inputs, varies, working_size
from tensorferry.server.shapes.empty_axes import EmptyAxes, axis_sets_to_test
from tensorferry.server.signature import Signature
from tensorferry.server.steps.batch_times import batch_times
from tensorferry.server.steps.loaded_step import LoadedStep, StepInstance, WarmupTime
from tensorferry.server.telemetry.load_progress import set_load_stage
from tensorferry.server.worker_process.errors import ProcessNotStarted
from tensorferry.server.worker_process.worker_process import WorkerProcess
from tensorferry.serving import DeclarationError, FunctionModel, calls_through

_log = logging.getLogger("tensorferry.server")

# The rows of the trial run: two, so that an output whose axis 0 does not count rows is found.
_TRIAL_ROWS = 2


def load_function_step(
    declared: FunctionModel, source: ModelSource, config: ServerConfig, watchdog: Watchdog | None
) -> LoadedStep:
    """Load a function, tried and warmed up. StartError has the traceback of what the user's code raised."""
    started = time.monotonic()
    set_load_stage("loading its Python code")
    given = source.config or ModelConfig()
    given_groups: Sequence[InstanceGroup] = ()
    if source.config is not None:
        declared, given_groups = configured(declared, given, source.name)
    signature = signature_of_function(declared)
    workers = _workers(declared, source)
    calls = [checked_call(declared, signature, worker.call) for worker in workers]
    set_load_stage("making a trial run")
    trial = _Trial(declared, signature, calls[0])
    runs = trial.runs()
    decision = configured_decision(_decision(declared, config, trial if runs else None), given)
    groups = given_groups or [
        InstanceGroup(
            ("cpu",) * len(calls),
            ModelInstanceGroup(name=source.name, kind=ModelInstanceGroup.KIND_CPU, count=len(calls)),
        )
    ]
    completed = complete_config(given, source, signature, decision, groups, config)
    completed.platform = completed.backend = PYTHON
    if given.input or given.output:
        check_tensors(completed, given, signature)
    generated = not given.HasField("dynamic_batching")
    settings = settings_of(completed, decision, groups, config, OrtOptions(), generated=generated)
    seconds: dict[int, float] = {}
    if runs:
        most = min(max(1, settings.max_batch_size), config.max_queue_size)
        seconds = batch_times(source.name, signature, trial.run, trial.inputs, most, settings.max_batch_size)
    load_seconds = time.monotonic() - started
    limits = RunLimits(watchdog, config.run_timeout, load_seconds)
    _log.info(
        "model %s version %s loaded from %s in %.2f s", source.name, source.version, source.path, load_seconds
    )

    def make_instance(number: int, health: InstanceHealth, health_index: int) -> StepInstance:
        process = workers[number].process
        instance = FunctionInstance(declared.name, calls[number], process, health, health_index, limits)
        close = (lambda: None) if process is None else process.close
        return StepInstance(instance.run, instance.on_hang, close=close, process=process)

    return LoadedStep(
        name=source.name,
        signature=signature,
        settings=settings,
        config=completed,
        decision=decision,
        batching=decision.description,
        make_instance=make_instance,
        run_seconds=seconds,
        # Without fixed shapes, a run's time depends on more than the rows.
        warmup=() if varies(signature) else tuple(WarmupTime(rows, took) for rows, took in seconds.items()),
        # Python code is given empty axes as they are: numpy does not end the process on them.
        empty_axes=EmptyAxes(
            dict.fromkeys(axis_sets_to_test(signature, batched=settings.max_batch_size > 0), "")
        ),
        steady=declared.steady,
        python=True,
    )


class _Worker(NamedTuple):
    """What runs a function: a thread of the batcher, or a process."""

    call: BatchCall
    process: WorkerProcess | None = None


def _workers(declared: FunctionModel, source: ModelSource) -> Sequence[_Worker]:
    """Return what runs each instance. StartError if the function, or a process, cannot be loaded."""
    if not declared.processes:
        return [_in_thread(_bound(declared)) for _ in range(declared.workers)]
    refused = RefusedRequests()
    processes = [
        WorkerProcess(
            source.path, declared.name, name=f"model {source.name}, process {number}", refused=refused
        )
        for number in range(declared.processes)
    ]
    try:
        # At the same time, because imports may take seconds.
        with ThreadPoolExecutor(len(processes)) as starts:
            for started in [starts.submit(process.start) for process in processes]:
                started.result()
    except BaseException as error:
        for process in processes:
            process.close()
        if isinstance(error, ProcessNotStarted):
            raise StartError(error.reason) from None
        raise
    return [_Worker(process.run, process) for process in processes]


def _in_thread(call: Call) -> _Worker:
    return _Worker(lambda inputs, rows: call(inputs))


def _bound(declared: FunctionModel) -> Call:
    try:
        return bound_call(declared)
    except DeclarationError as error:
        raise StartError(str(error)) from None
    except Exception as error:
        raise StartError(f"model {declared.name!r} cannot be loaded:\n{traceback_text(error)}") from None


class _NoCalls:
    """`ModelCaller` of trial runs. Other models can be called only once they are loaded, too."""

    def __init__(self) -> None:
        # The model that the function called last, if any.
        self.called = ""

    def submit(
        self, model: str, version: str, inputs: Mapping[str, Any], timeout: float | None
    ) -> Future[dict[str, Any]]:
        self.called = model
        raise NotReadyError(f"model {model!r} cannot be called in a trial run")


class _Trial:
    """Runs of a function with its example, or with random inputs."""

    def __init__(self, declared: FunctionModel, signature: Signature, call: BatchCall) -> None:
        self._declared = declared
        self._signature = signature
        self._call = call
        self._size = 1
        self._calls = _NoCalls()
        # What is wrong with the outputs of the last run, if it returned any.
        self._wrong = ""
        self._example = None if declared.example is None else _example(declared, signature)

    @property
    def signature(self) -> Signature:
        """The function's signature."""
        return self._signature

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the function; ModelFailedError if it raises."""
        try:
            with calls_through(self._calls):
                outputs: dict[str, Any] = self._call(inputs, ())
        except WrongOutputs as wrong:
            self._wrong = str(wrong)
            raise
        except Exception as error:
            raise ModelFailedError(f"{type(error).__name__}: {error}") from error
        return {name: value[:] if isinstance(value, RaggedRows) else value for name, value in outputs.items()}

    def inputs(self, rows: int) -> Mapping[str, Array]:
        """Return inputs with this number of rows."""
        if self._example is None:
            return random_inputs(self._signature, rows, self._size)
        if self._declared.max_batch_size == 0:
            return self._example
        return {name: np.resize(array, (rows, *array.shape[1:])) for name, array in self._example.items()}

    def runs(self) -> bool:
        """Make the trial run; return whether the function accepts the input. It is not tried if it calls other models.

        StartError if it returns something else than it declares, or raises on its own example.
        """
        name = self._declared.name
        try:
            if self._example is None:
                size, reason = working_size(self._signature, self.run)
                if self._wrong:
                    raise WrongOutputs(self._wrong)
                if size is None and not self._calls.called:
                    _log.info(
                        "model %s: its trial run on random input raised %s; its outputs are checked when it answers requests. "
                        "Give @model(example=...) to check it at load",
                        name,
                        reason,
                    )
                if size is None:
                    return False
                self._size = size
            rows = 1 if self._declared.max_batch_size in (0, 1) or not self._declared.batched else _TRIAL_ROWS
            self.run(self.inputs(rows))
        except WrongOutputs as wrong:
            raise StartError(f"model {name!r}, trial run: {wrong}") from None
        except ModelFailedError as error:
            if self._calls.called:
                return False
            if self._example is None:
                # It accepts one row of random input, but not two.
                _log.info("model %s: its trial run on %d rows of random input raised %s", name, rows, error)
                return False
            text = "".join(traceback.format_exception(error.__cause__))
            raise StartError(f"model {name!r} raised on its own example:\n{text}") from None
        finally:
            if self._calls.called:
                _log.info(
                    "model %s calls model %s, so it is not tried at load; its outputs are checked when it answers requests",
                    name,
                    self._calls.called,
                )
        return True


def _example(declared: FunctionModel, signature: Signature) -> dict[str, Array]:
    """Return the declared example as arrays; StartError if it does not fit the inputs."""
    arrays: dict[str, Array] = {}
    for spec in signature.inputs:
        given: Any = (declared.example or {})[spec.name]
        try:
            array = np.asarray(given, spec.datatype.storage)
        except (TypeError, ValueError) as error:
            raise StartError(
                f"model {declared.name!r}: the example of input {spec.name!r} is no array of {spec.datatype.name} ({error})"
            ) from None
        if not declared.batched:
            array = array[None]
        if array.ndim != len(spec.dims) or not array.size:
            raise StartError(
                f"model {declared.name!r}: the example of input {spec.name!r} has shape {list(array.shape)}; it must have at "
                f"least one row, and fit {list(spec.shape)}"
            )
        arrays[spec.name] = array
    return arrays


def _decision(declared: FunctionModel, config: ServerConfig, trial: _Trial | None) -> BatchingDecision:
    """Return how a function is batched. StartError if it asks for a test that it does not pass."""
    if declared.max_batch_size == 0:
        return BatchingDecision(0, False, "unbatched (max_batch_size is 0 in its declaration)")
    if not declared.batched:
        return BatchingDecision(1, True, "one row at a time (declared)", "trusted")
    most = config.max_batch_size if declared.max_batch_size is None else declared.max_batch_size
    if not most:
        raise StartError(
            f"model {declared.name!r} counts rows on axis 0, but --max-batch-size is 0; declare its max_batch_size"
        )
    if declared.batching == "trust":
        return BatchingDecision(most, True, f"batches of up to {most} rows (declared)", "trusted")
    if trial is None:
        raise StartError(
            f"model {declared.name!r} asks for batching='tested', but does not run on random input: give an example that "
            "runs, or leave batching out"
        )
    found = compare_rows(trial.signature, trial.run, ComparisonSettings(most))
    if found.outcome is not ComparisonOutcome.SEPARATE:
        raise StartError(
            f"model {declared.name!r} asks for batching='tested', and fails: {found.reason}; mend it, or declare "
            "batched=False"
        )
    _log.info("model %s: rows are independent, tested by running: %s", declared.name, found.extent)
    return BatchingDecision(most, True, f"batches of up to {most} rows (tested)", "tested")
