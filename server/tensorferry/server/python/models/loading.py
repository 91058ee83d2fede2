"""Loading of a Python function: its import, its check, and the decision how it is batched."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from tensorferry.protos.model_config_pb2 import ModelConfig, ModelInstanceGroup
from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.instance_groups import InstanceGroup
from tensorferry.server.models.config_pbtxt.pbtxt import PYTHON, BatchingDecision, complete_config
from tensorferry.server.models.config_pbtxt.settings import settings_of
from tensorferry.server.observability.logs.load_progress import set_load_stage
from tensorferry.server.processes.functions.errors import FunctionRaised, ProcessNotStarted
from tensorferry.server.processes.functions.worker_process import WorkerProcess
from tensorferry.server.processes.suspect_requests import RefusedRequests
from tensorferry.server.python.functions.answers import NO_MORE, answers_of
from tensorferry.server.python.functions.call import bound_call
from tensorferry.server.python.functions.failure import describe, traceback_text
from tensorferry.server.python.models.configured import check_tensors, configured, configured_decision
from tensorferry.server.python.models.instance import (
    BatchCall,
    FunctionInstance,
    checked_answers,
    checked_call,
)
from tensorferry.server.python.models.load_check import LoadCheck, check_at_load
from tensorferry.server.python.steps.loaded_step import LoadedStep, StepInstance
from tensorferry.server.runtime.axes import EmptyAxes, axis_sets_to_test
from tensorferry.server.runtime.checks.sampling import Array, varies
from tensorferry.server.runtime.checks.trial_runs import trial_run
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.server.runtime.recovery.watchdog import RunLimits, Watchdog
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.serving import DeclarationError, FunctionModel, TensorType

_log = logging.getLogger("tensorferry.server")


def load_function_step(
    declared: FunctionModel, source: ModelSource, config: ServerConfig, watchdog: Watchdog | None
) -> LoadedStep:
    """Load a function and check it. StartError has the traceback of what the user's code raised."""
    started = time.monotonic()
    set_load_stage("loading its Python code")
    given = source.config or ModelConfig()
    given_groups: Sequence[InstanceGroup] = ()
    if source.config is not None:
        declared, given_groups = configured(declared, given, source.name)
    signature = signature_of_function(declared)
    workers = _workers(declared, source)
    with _closing_on_error(workers):
        checked = checked_answers if declared.streams else checked_call
        calls = [checked(declared, signature, worker.call) for worker in workers]
        set_load_stage("checking it by running it")
        most = _most_rows(declared, config)
        tried = _tried(declared.name, workers[0], _first_answer(calls[0]) if declared.streams else calls[0])
        found = check_at_load(declared, signature, tried, min(most, config.max_queue_size))
        decision = _decision(declared, config.batching, most, found)
        decision = configured_decision(decision, given)
        groups = given_groups or [
            InstanceGroup(
                ("cpu",) * len(calls),
                ModelInstanceGroup(name=source.name, kind=ModelInstanceGroup.KIND_CPU, count=len(calls)),
            )
        ]
        completed = complete_config(given, source, signature, decision, groups, config)
        completed.platform = completed.backend = PYTHON
        completed.model_transaction_policy.decoupled = declared.streams
        if given.input or given.output:
            check_tensors(completed, given, signature)
        generated = not given.HasField("dynamic_batching")
        settings = settings_of(completed, decision, groups, config, OrtOptions(), generated=generated)
    load_seconds = time.monotonic() - started
    limits = RunLimits(watchdog, config.run_timeout, load_seconds)
    _log.info(
        "model %s version %s loaded from %s in %.2f s", source.name, source.version, source.path, load_seconds
    )

    def make_instance(number: int, health: InstanceHealth, health_index: int) -> StepInstance:
        process = workers[number].process
        instance = FunctionInstance(declared.name, calls[number], process, health, health_index, limits)
        answers = instance.answers if declared.streams else None
        return StepInstance(
            instance.run, instance.on_hang, close=workers[number].close, process=process, answers=answers
        )

    return LoadedStep(
        name=source.name,
        signature=signature,
        settings=settings,
        config=completed,
        decision=decision,
        batching=decision.description,
        make_instance=make_instance,
        run_seconds={} if declared.streams else found.seconds,
        # Without fixed shapes, a run's time depends on more than the rows.
        warmup={} if declared.streams or varies(signature) else found.seconds,
        # Python code is given empty axes as they are: numpy does not end the process on them.
        empty_axes=EmptyAxes(
            dict.fromkeys(axis_sets_to_test(signature, batched=settings.max_batch_size > 0), "")
        ),
        steady=declared.steady,
        python=True,
        streams=declared.streams,
        impure="" if declared.pure else f"function {declared.name!r} is not declared with pure=True",
    )


def signature_of_function(declared: FunctionModel) -> Signature:
    """Return the signature that clients see. A function of one row gets the axis of rows in front."""
    return Signature(
        tuple(
            replace(_spec(name, type_, declared.batched), most_bytes=declared.most_request_bytes)
            for name, type_ in declared.inputs.items()
        ),
        tuple(_spec(name, type_, declared.batched) for name, type_ in declared.outputs.items()),
    )


def _spec(name: str, type_: TensorType, batched: bool) -> TensorSpec:
    dims = tuple("" if dim == -1 else dim for dim in type_.dims)
    return TensorSpec(
        name,
        DATATYPES[type_.datatype],
        dims if batched else ("", *dims),
        binary=type_.datatype == "BYTES" and not type_.text,
    )


class _Worker(NamedTuple):
    """What runs a function: a thread of the batcher, or a process. `close` raises nothing."""

    call: BatchCall
    process: WorkerProcess | None = None
    close: Callable[[], None] = lambda: None


def _workers(declared: FunctionModel, source: ModelSource) -> Sequence[_Worker]:
    """Return what runs each instance. StartError if the function, or a process, cannot be loaded."""
    if declared.processes:
        return _in_processes(declared, source)
    workers: list[_Worker] = []
    with _closing_on_error(workers):
        for _ in range(declared.workers):
            workers.append(_in_thread(declared))
    return workers


def _in_thread(declared: FunctionModel) -> _Worker:
    try:
        if declared.takes_requests:
            made: Any = declared.function()
            made.load()
            run = (lambda inputs, rows: made.answers(inputs)) if declared.streams else made.run
            return _Worker(run, close=made.close)
        call = bound_call(declared)
    except DeclarationError as error:
        raise StartError(str(error)) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit too, which would end the thread that loads without an answer.
        raise StartError(f"model {declared.name!r} cannot be loaded:\n{traceback_text(error)}") from None
    if declared.streams:
        return _Worker(lambda inputs, rows: answers_of(call(inputs)))
    return _Worker(lambda inputs, rows: call(inputs))


def _in_processes(declared: FunctionModel, source: ModelSource) -> Sequence[_Worker]:
    refused = RefusedRequests()
    processes = [
        WorkerProcess(
            source.path, declared.name, name=f"model {source.name}, process {number}", refused=refused
        )
        for number in range(declared.processes)
    ]
    workers = [_of_process(process, streams=declared.streams) for process in processes]
    # At the same time, because imports may take seconds.
    with _closing_on_error(workers), ThreadPoolExecutor(len(processes)) as starts:
        for started in [starts.submit(process.start) for process in processes]:
            try:
                started.result()
            except ProcessNotStarted as error:
                raise StartError(error.reason) from None
    return workers


@contextmanager
def _closing_on_error(workers: Sequence[_Worker]) -> Iterator[None]:
    """Close workers if the load fails, because no instance of the model then does."""
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.close()
        raise


def _of_process(process: WorkerProcess, *, streams: bool) -> _Worker:
    run = (lambda inputs, rows: process.answers(inputs)) if streams else process.run
    return _Worker(run, process, process.close)


def _first_answer(call: BatchCall) -> BatchCall:
    """Return what runs a function that yields until its first answer, and returns that; no outputs if there is none."""

    def run(inputs: Mapping[str, Array], rows: Sequence[int]) -> Any:
        with closing(call(inputs, rows)) as answers:
            answer = answers.read()
        return {} if answer is NO_MORE else answer

    return run


def _tried(name: str, worker: _Worker, call: BatchCall) -> BatchCall:
    """Return the call as trial runs. Only a process can be ended."""
    end = (lambda: None) if worker.process is None else worker.process.end_runs

    def run(inputs: Mapping[str, Array], rows: Sequence[int]) -> Any:
        try:
            return call(inputs, rows)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            # SystemExit, which would end the load without an answer. Described as in a process.
            raise FunctionRaised(describe(error)) from None

    return lambda inputs, rows: trial_run(lambda: run(inputs, rows), f"function {name!r}", inputs, end)


def _most_rows(declared: FunctionModel, config: ServerConfig) -> int:
    """Return the largest batch; 0 if tensors have no rows."""
    if not declared.batched:
        return 1
    most = config.max_batch_size if declared.max_batch_size is None else declared.max_batch_size
    if not most and declared.max_batch_size is None:
        raise StartError(
            f"model {declared.name!r} counts rows on axis 0, but --max-batch-size is 0; declare its max_batch_size"
        )
    return most


def _decision(declared: FunctionModel, policy: str, most: int, found: LoadCheck) -> BatchingDecision:
    """Return how a function is batched, and log why its requests share no batch."""
    if declared.streams:
        return BatchingDecision(0, False, "unbatched (it answers in streams)")
    if not most:
        return BatchingDecision(0, False, "unbatched (max_batch_size is 0 in its declaration)")
    if not declared.batched:
        return BatchingDecision(1, True, "one row at a time (declared)", "trusted")
    reason = found.mixing if policy != "trust" else ""
    remedy = "let each row of the outputs depend on its own row of the inputs only, or if it does, declare check=False"
    if policy == "proved":
        reason = "--batching proved batches only models whose graph shows that their rows are independent"
        remedy = "serve it with --batching tested"
    if reason:
        _log.warning(
            "model %s: each request runs alone: %s; to change that: %s (--batching trust lets requests share batches anyway)",
            declared.name,
            reason,
            remedy,
        )
        description = f"requests of up to {most} rows, each alone ({reason})"
        return BatchingDecision(most, False, description, "refused", reason, remedies=(remedy,))
    verdict, how = ("tested", "tested") if found.compared else ("trusted", "declared")
    return BatchingDecision(most, True, f"batches of up to {most} rows ({how})", verdict)
