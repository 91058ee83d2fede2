"""One instance of a Python function: it runs batches, checks what is returned, and turns what is raised into our errors."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tensorferry.batcher import RunTimedOut
from tensorferry.server.function_call import Call
from tensorferry.server.python_models.failures import request_error, wrong_return
from tensorferry.server.python_models.outputs import DeclaredOutputs, RaggedRows, WrongOutputs
from tensorferry.server.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.recovery.watchdog import Overdue, RunLimits, WatchedRun
from tensorferry.server.runtime.sampling import Array
from tensorferry.server.signature import Signature
from tensorferry.serving import FunctionModel

_log = logging.getLogger("tensorferry.server")


def checked_call(declared: FunctionModel, call: Call, signature: Signature) -> Call:
    """Return what runs a batch and returns arrays, or `RaggedRows`, by output. Raises what `call` raises, or WrongOutputs."""
    first = signature.inputs[0].name
    if not declared.batched:
        of_row = DeclaredOutputs(
            [replace(spec, dims=spec.dims[1:]) for spec in signature.outputs], batched=False
        )

        def each_row(inputs: Mapping[str, Array]) -> dict[str, Any]:
            results = [
                of_row.checked(call({name: array[row] for name, array in inputs.items()}), 0)
                for row in range(len(inputs[first]))
            ]
            return {
                name: RaggedRows([np.asarray(result[name]) for result in results])
                for name in declared.outputs
            }

        return each_row
    has_rows = declared.max_batch_size != 0
    pads = declared.row_padding().values if declared.row_padding is not None else None
    outputs = DeclaredOutputs(signature.outputs, batched=has_rows, pads=pads)
    return lambda inputs: outputs.checked(call(inputs), len(inputs[first]) if has_rows else 0)


class FunctionInstance(WatchedRun):
    """One instance of a function. One thread at a time may call `run`; the other methods are thread-safe.

    `call` is made by `checked_call`. `step` is the function's name, and `health` has that of its model.
    """

    def __init__(self, step: str, call: Call, health: InstanceHealth, index: int, limits: RunLimits) -> None:
        super().__init__()
        self._step = step
        self._model = health.name
        self._call = call
        self._health = health
        self._index = index
        self._limit = limits.run_seconds or math.inf
        self._began = 0.0
        self._give_up: Callable[[RunTimedOut], None] = lambda error: None
        if limits.watchdog is not None:
            limits.watchdog.watch(self)

    def on_hang(self, give_up: Callable[[RunTimedOut], None]) -> None:
        """Set the function to call if a run does not end in time."""
        self._give_up = give_up

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Run the function on a batch; return arrays or `RaggedRows` by output. Raises as `request_error` says."""
        self._began = time.monotonic()
        self._overdue = None
        self._due = self._began + self._limit
        try:
            outputs: dict[str, Any] = self._call(inputs)
            return outputs
        except WrongOutputs as wrong:
            failure: BaseException = wrong_return(str(wrong), self._model, self._step)
        except BaseException as error:
            failure = request_error(error, self._model, self._step)
        finally:
            self._due = None
            if self._overdue is not None:
                self._returned()
        try:
            raise failure
        finally:
            # Its traceback refers to this frame, which would keep the batch's arrays alive.
            del failure

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
        if self.finish() is Overdue.HUNG:
            _log.warning(
                "model %s: the function %r has returned after %.1f s",
                self._model,
                self._step,
                time.monotonic() - self._began,
            )
            self._health.mark_up(self._index)
