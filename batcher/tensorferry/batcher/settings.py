"""What a batcher is told, held against what makes sense: by itself, and beside the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorferry.batcher.padding import Padding


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


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How requests of a class wait; `timeout` in seconds from arrival, inf for none.

    A request may ask for a shorter one if `overridable`. When it is over, the request fails
    (DeadlineExceeded), or, if `delays`, goes on behind all of its class and those above it that have time
    left. `max_requests` bounds how many are queued; 0: it does not.
    """

    timeout: float = math.inf
    overridable: bool = False
    delays: bool = False
    max_requests: int = 0

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout!r}; it must be above 0, inf for none")
        if self.max_requests < 0:
            raise ValueError(f"max_requests is {self.max_requests!r}; it must be at least 0, 0 for no bound")

    @property
    def expires(self) -> bool:
        """Whether a request may time out at all."""
        return self.timeout < math.inf or self.overridable


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """What a client may have; 0 for no bound.

    `max_requests`, `max_rows` and `max_bytes` bound what was accepted of a client and is not done. `rate` is in
    rows a second, and `burst` the rows that a client that was quiet may send at once (0: those of a second, at
    least one). If `fair`, clients share the queue and the batches of a class by `weights`; who has none there has 1.
    """

    max_requests: int = 0
    max_rows: int = 0
    max_bytes: int = 0
    rate: float = 0.0
    burst: int = 0
    fair: bool = False
    weights: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_rows", "max_bytes", "rate", "burst"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be at least 0 and finite, 0 for no bound")
        for client, weight in self.weights.items():
            if weight < 1:
                raise ValueError(f"the weight of client {client!r} is {weight!r}; it must be at least 1")

    @property
    def bounds(self) -> bool:
        """Whether any client may be refused for what it has, or sends."""
        return bool(self.max_requests or self.max_rows or self.max_bytes or self.rate)

    @property
    def most_at_once(self) -> float:
        """The rows that a quiet client may send at once; inf where no rate is set."""
        if not self.rate:
            return math.inf
        return float(self.burst) if self.burst else max(1.0, self.rate)


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batch_size` in rows (at least 1), `max_queue_delay` in seconds from arrival (0: no window).

    `preferred` are the sizes that a batch has, if it can, in ascending order. Unless requests `merge`, each
    is a batch of its own, as soon as it can be: there are no windows and no preferred sizes then.
    """

    max_batch_size: int
    max_queue_delay: float
    preferred: tuple[int, ...] = ()
    merges: bool = True

    @property
    def full(self) -> int:
        """With so many rows queued nothing is gained by waiting."""
        return self.max_batch_size if self.merges else 1


def unreachable(limits: Limits, max_queue_rows: int) -> Iterator[str]:
    """Why a full batch can never come about, if there is a reason in the limits."""
    if max_queue_rows < limits.max_batch_size:
        yield (
            f"no batch can have more than {max_queue_rows} rows, since no more can be queued; max_batch_size is "
            f"{limits.max_batch_size}: raise max_queue_size to at least that"
        )
