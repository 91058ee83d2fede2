"""Futures as thin adapters over completion callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from tensorferry.batcher.execution.collate import first_row
from tensorferry.batcher.request import Outcome


def deliver_rows(future: Future[Any]) -> Callable[[Outcome], None]:
    """A completion that gives a future the request's rows."""

    def complete(outcome: Outcome) -> None:
        # False when the future was cancelled: nobody waits for the outcome.
        if not future.set_running_or_notify_cancel():
            return
        if outcome.error is not None:
            future.set_exception(outcome.error)
            return
        try:
            result = _own(outcome.outputs)
        except Exception as error:
            # No memory for the copy, say: whoever waits must hear of it.
            future.set_exception(error)
            return
        future.set_result(result)

    return complete


def deliver_row(future: Future[Any]) -> Callable[[Outcome], None]:
    """A completion that gives a future the one row of the request, without its axis."""
    deliver = deliver_rows(future)

    def complete(outcome: Outcome) -> None:
        deliver(
            outcome if outcome.error is not None else outcome._replace(outputs=first_row(outcome.outputs))
        )

    return complete


def propagate_cancel(future: Future[Any], cancel: Callable[[], object]) -> None:
    """Calls `cancel` when the future is cancelled."""
    future.add_done_callback(lambda done: cancel() if done.cancelled() else None)


def _own(outputs: Any) -> Any:
    """Copies views of the batch, so that who keeps a row does not keep the batch alive."""
    if isinstance(outputs, Mapping):
        return {name: _own(output) for name, output in outputs.items()}
    if type(outputs) in (list, tuple):
        return type(outputs)(_own(row) for row in outputs)
    return outputs.copy() if isinstance(outputs, np.ndarray) and outputs.base is not None else outputs
