"""Splitting of requests larger than a batch, and joining of their parts' outputs."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from tensorferry.batcher.errors import ModelOutputError
from tensorferry.batcher.execution.collate import own
from tensorferry.batcher.request import Array, Outcome, Request, Tensor


def split_request(request: Request, full_rows: Callable[[Hashable], int]) -> tuple[Request, ...]:
    """Split a request of more rows than a batch into parts that complete it together.

    The request is answered with the last part, with the parts' outputs joined on axis 0. The first error of a part
    is the error of the request. A request with groups is split into these first. Consecutive parts of equal key fill batches
    of `full_rows(key)` rows.
    """
    cuts: list[tuple[Request, int, int]] = []
    key, rows, room = object(), 0, 0
    for group in request.groups or (request,):
        if group.key != key:
            key, rows = group.key, full_rows(group.key)
            room = rows
        start = 0
        while start < group.rows:
            stop = min(group.rows, start + room)
            cuts.append((group, start, stop))
            room = room - (stop - start) or rows
            start = stop
    gather = _Gather(request, len(cuts))
    parts = []
    for index, (group, start, stop) in enumerate(cuts):
        part = cut(group, start, stop, gather.completion(index))
        part.rank = request.rank
        part.part_number = len(cuts) - index
        parts.append(part)
    return tuple(parts)


def cut(request: Request, start: int, stop: int, complete: Callable[[Outcome], None]) -> Request:
    """Return a request of some of another's rows; both share memory."""
    rows = stop - start
    return Request(
        tuple(
            tensor if at in request.shared else _rows_of(tensor, start, stop)
            for at, tensor in enumerate(request.tensors)
        ),
        complete,
        names=request.names,
        rows=rows,
        nbytes=math.ceil(request.nbytes * rows / request.rows),
        key=request.key,
        deadline=request.deadline,
        priority=request.priority,
        padding=request.padding,
        max_queue_time=request.max_queue_time,
        tag=request.tag,
        client=request.client,
        shared=request.shared,
        owner=request.owner,
    )


def _rows_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    shape = (stop - start, *tensor.shape[1:])
    if tensor.dtype.hasobject:
        return Tensor(tensor.dtype, shape, tensor.data[start:stop])
    row = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    return Tensor(tensor.dtype, shape, memoryview(tensor.data).cast("B")[start * row : stop * row])


class _Gather:
    """Outcomes of a split request's parts; completes the request once."""

    def __init__(self, request: Request, count: int) -> None:
        # Guards the fields below. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._outcomes: list[Outcome | None] = [None] * count
        self._missing = count
        self._places = request.places
        self._complete: Callable[[Outcome], None] | None = request.complete

    def completion(self, index: int) -> Callable[[Outcome], None]:
        def complete(outcome: Outcome) -> None:
            if outcome.error is None:
                try:
                    outcome = outcome._replace(outputs=own(outcome.outputs))
                except Exception as error:
                    # No memory for the copy, for example.
                    outcome = Outcome(error=error)
            with self._lock:
                self._outcomes[index] = outcome
                self._missing -= 1
                finished = self._missing == 0 or outcome.error is not None
                if not finished or self._complete is None:
                    return
                deliver, self._complete = self._complete, None
            deliver(outcome if outcome.error is not None else self._joined())

        return complete

    def _joined(self) -> Outcome:
        outcomes = [outcome for outcome in self._outcomes if outcome is not None]
        self._outcomes.clear()
        try:
            outputs = join_outputs([outcome.outputs for outcome in outcomes], self._places)
        except Exception as error:
            # The parts' outputs do not fit together: other names, shapes, types.
            return Outcome(error=error)
        return Outcome(
            outputs, None, outcomes[-1].batch, outcomes[0].queue_delay, priority=outcomes[0].priority
        )


def join_outputs(outputs: Sequence[Any], places: Array | None = None) -> Any:
    """Join the outputs of consecutive rows on axis 0.

    With `places`, row `i` of the result is row `places[i]` of the outputs in this order. Arrays whose rows differ in shape
    then become a list of rows; without `places` they raise ModelOutputError. A list keeps its type and attributes.
    """
    first = outputs[0]
    if isinstance(first, dict):
        return {name: join_outputs([output[name] for output in outputs], places) for name in first}
    lists = [output for output in outputs if not isinstance(output, np.ndarray)]
    if not lists:
        shapes = {output.shape[1:] for output in outputs}
        if len(shapes) == 1:
            joined = np.concatenate(outputs)
            return joined if places is None else joined[places]
        if places is None:
            # Padding would be a guess, because the function may have padded the arrays itself, with another value.
            raise ModelOutputError(
                f"a request ran in several batches, and the rows of an output have different shapes in them: "
                f"{sorted(shapes)[:4]}; return a list of rows, which can be padded, or send at most a batch's rows at once"
            )
    rows = [row for output in outputs for row in output]
    if places is not None:
        rows = [rows[place] for place in places]
    if not lists or type(lists[0]) is tuple:
        return rows
    like = copy.copy(lists[0])
    like[:] = rows
    return like
