"""Futures as thin adapters over completion callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from tensorferry.batcher.execution.collate import first_row
from tensorferry.batcher.request import Outcome


def completion_of(future: Future[Any], *, one_row: bool) -> Callable[[Outcome], None]:
    """A callback that resolves a future with a request's rows; with `one_row`, with its only row without axis 0."""

    def complete(outcome: Outcome) -> None:
        # False if the future was cancelled: nothing waits for the outcome.
        if not future.set_running_or_notify_cancel():
            return
        if outcome.error is not None:
            future.set_exception(outcome.error)
            return
        try:
            result = _own(first_row(outcome.outputs) if one_row else outcome.outputs)
        except Exception as error:
            # No memory for the copy, for example.
            future.set_exception(error)
            return
        future.set_result(result)

    return complete


def propagate_cancel(future: Future[Any], cancel: Callable[[], object]) -> None:
    """Call `cancel` when the future is cancelled."""
    future.add_done_callback(lambda done: cancel() if done.cancelled() else None)


def _own(outputs: Any) -> Any:
    """Copy views of the batch, because a view would keep the whole batch alive."""
    if isinstance(outputs, Mapping):
        return {name: _own(output) for name, output in outputs.items()}
    if type(outputs) in (list, tuple):
        return type(outputs)(_own(row) for row in outputs)
    return outputs.copy() if isinstance(outputs, np.ndarray) and outputs.base is not None else outputs
