"""What a batcher is told, held against what makes sense: by itself, and beside the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.batcher.padding import Padding
from tensorferry.batcher.queue.timeouts import QueuePolicy


@dataclass(frozen=True, slots=True)
class BatcherSettings:
    """What a batcher was told: as `Batcher` has it, but that `default_priority` is a class, never 0."""

    max_batch_size: int
    max_queue_delay: float
    preferred_batch_sizes: tuple[int, ...]
    merge: bool
    priority_weights: tuple[int, ...]
    strict_priorities: bool
    default_priority: int
    policies: tuple[QueuePolicy, ...]
    max_queue_size: int
    max_queue_bytes: int
    functions: int
    pipelined: bool
    steady: bool


def check_sizes(
    max_batch_size: int,
    max_queue_delay: float,
    max_queue_size: int,
    max_queue_bytes: int,
    preferred: Sequence[int],
) -> None:
    """ValueError when a bound is none, or preferred sizes are not those of batches."""
    for option, value, least in (
        ("max_batch_size", max_batch_size, 0),
        ("max_queue_delay", max_queue_delay, 0),
        ("max_queue_size", max_queue_size, 1),
        ("max_queue_bytes", max_queue_bytes, 1),
    ):
        _check_number(option, value, least)
    if preferred and not 1 <= min(preferred) <= max(preferred) <= max_batch_size:
        raise ValueError(
            f"preferred_batch_sizes is {preferred!r}; each must be from 1 to max_batch_size, {max_batch_size}"
        )


def _check_number(option: str, value: float, least: int) -> None:
    if not value >= least or math.isinf(value):
        raise ValueError(f"{option} is {value!r}; it must be at least {least} and finite")


def check_classes(
    weights: Sequence[int], default_priority: int, policies: Sequence[QueuePolicy], *, strict: bool
) -> None:
    """ValueError when the priority classes, and what is said of each, do not fit together."""
    _check_number("default_priority", default_priority, 0)
    if not weights or min(weights) < 1:
        raise ValueError(f"priority_weights is {weights!r}; give each class at least 1")
    if default_priority > len(weights):
        raise ValueError(
            f"default_priority is {default_priority}; there are {len(weights)} classes, from 1, the highest"
        )
    if policies and len(policies) != len(weights):
        raise ValueError(
            f"policies has {len(policies)} entries; give each of the {len(weights)} classes one, or none at all"
        )
    if any(policy.delays for policy in policies) and len(weights) > 1 and not strict:
        raise ValueError(
            "a policy delays, which puts requests behind all of their class and above, but classes share by "
            "weights; give strict_priorities"
        )


def check_batching(
    max_batch_size: int,
    max_queue_delay: float,
    preferred: Sequence[int],
    padding: Padding | None,
    *,
    merge: bool,
) -> None:
    """ValueError when something is said of batches of several requests, and there are none."""
    if not merge and (max_queue_delay or preferred):
        raise ValueError(
            f"merge is false, so no batch waits for more; leave out max_queue_delay, {max_queue_delay!r}, and "
            f"preferred_batch_sizes, {preferred!r}"
        )
    if padding is not None and max_batch_size == 0:
        raise ValueError("max_batch_size is 0, so nothing shares a batch; leave out padding, or batch")


def functions_of(
    model_fn: Callable[[Any], Any] | Sequence[Callable[[Any], Any]], workers: int
) -> Sequence[Callable[[Any], Any]]:
    """A function for each device: those given, or the one as often as batches of it may run at the same time."""
    _check_number("workers", workers, 1)
    functions = list(model_fn) if isinstance(model_fn, Sequence) else [model_fn] * workers
    if not functions or (isinstance(model_fn, Sequence) and workers != 1):
        raise ValueError(
            f"model_fn has {len(functions)} functions and workers is {workers}; give one of both"
        )
    return functions
