"""One instance of a Python function: it runs batches, checks what is returned, and turns what is raised into our errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from tensorferry.batcher import (
    BatcherClosed,
    BatchFailed,
    DeadlineExceeded,
    InstanceFailed,
    QueueFull,
    RunTimedOut,
    Shed,
)
from tensorferry.server.errors import NotFoundError, NotReadyError
from tensorferry.server.processes.functions.errors import ProcessDied, ProcessNotStarted
from tensorferry.server.processes.functions.worker_process import WorkerProcess
from tensorferry.server.python.functions.answers import NO_MORE, Answers
from tensorferry.server.python.models.failures import request_error, wrong_return
from tensorferry.server.python.models.outputs import DeclaredOutputs, WrongOutputs, joined_rows
from tensorferry.server.runtime.checks.sampling import Array
from tensorferry.server.runtime.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.runtime.recovery.watchdog import Overdue, RunLimits, WatchedRun
from tensorferry.server.signature import Signature
from tensorferry.serving import FunctionModel

_log = logging.getLogger("tensorferry.server")

# Errors of other models that a function called, which do not depend on the inputs. In an overload of such a model, the parts
# of each failed batch would call it again and again.
_NOT_THE_REQUESTS = (NotReadyError, NotFoundError, QueueFull, Shed, DeadlineExceeded, BatcherClosed)

_T = TypeVar("_T")

# Runs a batch, given its inputs by name and the rows of each of its requests, and returns what `Call` returns.
BatchCall: TypeAlias = Callable[[Mapping[str, Array], Sequence[int]], Any]


def checked_answers(declared: FunctionModel, signature: Signature, call: BatchCall) -> BatchCall:
    """Return what begins a run of a function that yields, and returns its `Answers`, with arrays by output."""
    outputs = DeclaredOutputs(signature.outputs, batched=False, copy=not declared.processes)
    return lambda inputs, rows: _CheckedAnswers(call(inputs, rows), outputs)


class _CheckedAnswers:
    """`Answers` that are checked against the declaration. Reading them raises WrongOutputs, too."""

    def __init__(self, answers: Answers, outputs: DeclaredOutputs) -> None:
        self._answers = answers
        self._outputs = outputs
        self.close, self.cancel = answers.close, answers.cancel

    def read(self) -> Any:
        answer = self._answers.read()
        return NO_MORE if answer is NO_MORE else self._outputs.checked(answer, 0)


def checked_call(declared: FunctionModel, signature: Signature, call: BatchCall) -> BatchCall:
    """Return what runs a batch and returns arrays, or `RaggedRows`, by output. Raises what `call` raises, or WrongOutputs."""
    if not declared.batched:
        of_row = DeclaredOutputs(
            [replace(spec, dims=spec.dims[1:]) for spec in signature.outputs], batched=False, copy=False
        )

        def check_rows(inputs: Mapping[str, Array], rows: Sequence[int]) -> dict[str, Any]:
            results = [of_row.checked(result, 0) for result in call(inputs, rows)]
            return {
                spec.name: joined_rows(spec, [result[spec.name] for result in results])
                for spec in signature.outputs
            }

        return check_rows
    first = signature.inputs[0].name
    has_rows = declared.max_batch_size != 0
    pads = declared.row_padding().values if declared.row_padding is not None else None
    # What a process returned is copied from its memory already.
    outputs = DeclaredOutputs(signature.outputs, batched=has_rows, copy=not declared.processes, pads=pads)
    return lambda inputs, rows: outputs.checked(call(inputs, rows), len(inputs[first]) if has_rows else 0)


class FunctionInstance(WatchedRun):
    """One instance of a function. One thread at a time may call `run`; the other methods are thread-safe.

    `call` is made by `checked_call`; it runs in `process`, or in this process without one. `step` is the function's name,
    and `health` has that of its model.
    """

    def __init__(
        self,
        step: str,
        call: BatchCall,
        process: WorkerProcess | None,
        health: InstanceHealth,
        index: int,
        limits: RunLimits,
    ) -> None:
        self._step = step
        self._model = health.name
        self._call = call
        self._process = process
        if process is not None:
            process.on_death(lambda: health.record(InstanceEvent.PROCESS_DIED))
        super().__init__(health, index, limits)

    def run(self, inputs: Mapping[str, Array], rows: Sequence[int] = ()) -> dict[str, Any]:
        """Run the function on a batch; return arrays or `RaggedRows` by output.

        `rows` has the rows of each request. Raises as `request_error` says, in `BatchFailed` if all requests get that; InstanceFailed if the process cannot be started,
        RunTimedOut if it was killed because the run took too long.
        """
        self._ensure_process()
        outputs: dict[str, Any] = self._limited(lambda: self._call(inputs, rows))
        return outputs

    def answers(
        self, inputs: Mapping[str, Array], on_over: Callable[[Callable[[], None]], None]
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the answers of a function that yields, to one request; arrays by output. Raises as `run` does.

        Each answer may take as long as a run. `on_over` is given what to call, on any thread, if nobody reads them any more.
        Close the iterator, which closes the function's generator.
        """
        # Only here, because InstanceFailed after an answer would let the batcher run the request again.
        self._ensure_process()
        source: Answers = self._limited(lambda: self._call(inputs, ()))
        on_over(source.cancel)
        try:
            while (answer := self._limited(source.read)) is not NO_MORE:
                yield answer
        finally:
            self._limited(source.close)

    def _ensure_process(self) -> None:
        if self._process is not None and self._process.pid is None:
            self._start_process()

    def _limited(self, call: Callable[[], _T]) -> _T:
        """Return what a call of the function returns, which may take as long as a run. Raises as `run` does."""
        self._began = time.monotonic()
        # In the order that `WatchedRun` asks for.
        self._running, self._overdue = self._process, None
        self._due = self._began + self._limit
        try:
            return call()
        except BaseException as error:
            failure = self._failure(error, self.finish())
        finally:
            self._due = None
            if self._overdue is not None and self.finish() is Overdue.HUNG:
                self._returned()
            self._running = None
        try:
            raise failure
        finally:
            # Its traceback refers to this frame, which would keep the batch's arrays alive.
            del failure

    def _failure(self, error: BaseException, overdue: Overdue | None) -> BaseException:
        if isinstance(error, WrongOutputs):
            return wrong_return(str(error), self._model, self._step)
        if isinstance(error, ProcessNotStarted):
            return self._not_started(error)
        if overdue is Overdue.ENDED and isinstance(error, ProcessDied):
            self._health.record(InstanceEvent.RUN_ENDED)
            return RunTimedOut(
                f"the batch ran for longer than {self._limit:g} s, which --run-timeout-seconds allows, and its process was "
                "killed: raise that if this function takes so long"
            )
        found = request_error(error, self._model, self._step)
        return BatchFailed(found) if isinstance(found, _NOT_THE_REQUESTS) else found

    def _start_process(self) -> None:
        """Start the process again. InstanceFailed says when to try again if that fails.

        It may take longer than a run, because it imports the user's code again.
        """
        assert self._process is not None
        self._running, self._overdue = self._process, None
        self._due = time.monotonic() + self._rebuild_limit
        try:
            self._process.start()
        except (ProcessNotStarted, ProcessDied) as error:
            raise self._not_started(error) from None
        finally:
            self.finish()
            self._running = None
        self._health.record(InstanceEvent.REBUILT)
        self._health.mark_up(self._index)

    def _not_started(self, error: ProcessNotStarted | ProcessDied) -> InstanceFailed:
        """Return the batcher's error. The process has logged the reason."""
        self._health.record(InstanceEvent.REBUILD_FAILED)
        self._health.mark_down(self._index, str(error))
        return InstanceFailed(str(error), getattr(error, "retry_after", 1.0), self._start_process)

    def _give_up_run(self) -> None:
        reason = f"the function {self._step!r} runs for longer than {self._limit:g} s (--run-timeout-seconds)"
        _log.critical("model %s: %s; restart the server if it does not return", self._model, reason)
        self._health.record(InstanceEvent.HUNG)
        self._health.mark_down(self._index, reason, unrecoverable=True)
        self._give_up(RunTimedOut(f"{reason}, and was given up"))
        if not self.hangs:
            # The run ended meanwhile, and may have marked the instance up before it was marked down here.
            self._health.mark_up(self._index)

    def _returned(self) -> None:
        took = time.monotonic() - self._began
        _log.warning("model %s: the function %r has returned after %.1f s", self._model, self._step, took)
        self._health.mark_up(self._index)
