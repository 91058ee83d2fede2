"""Offline inference: run a model function over many inputs, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from tensorferry.batcher.execution.collate import first_row, join, own, request_of, split
from tensorferry.batcher.padding import Padding
from tensorferry.batcher.request import Outcome, Request


def batch_inference(
    model_fn: Callable[[Any], Any],
    inputs: Iterable[Any],
    batch_size: int = 32,
    *,
    padding: Padding | None = None,
) -> list[Any]:
    """Run `model_fn` over `inputs`, at most `batch_size` at a time, and return the results in order.

    `inputs` are examples without the batch axis: the rows of an array, or an iterable of arrays or of dicts of arrays.
    Consecutive examples share a batch if they agree in dtypes and shapes, after padding. An exception of `model_fn`
    propagates. Everything runs on the calling thread. If the input is an array, `np.stack` of the result is the array of
    all outputs.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    results: list[Any] = []
    iterator = iter(inputs)
    while chunk := list(islice(iterator, batch_size)):
        group: list[Request] = []
        for example in chunk:
            request = request_of(example, _ignore, one_row=True, padding=padding)
            if group and group[0].key != request.key:
                results += _run(model_fn, group)
                group = []
            group.append(request)
        results += _run(model_fn, group)
    return results


def _ignore(outcome: Outcome) -> None:
    """Completion of a request whose result is returned instead."""


def _run(model_fn: Callable[[Any], Any], group: list[Request]) -> list[Any]:
    return [own(first_row(outputs)) for outputs in split(model_fn(join(group)), group)]
