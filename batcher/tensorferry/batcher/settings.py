"""The settings of a batcher, checked for themselves and against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Bounds on the queue of a class: time and number of requests. `timeout` is in seconds from arrival, inf for none.

    A request may bring a shorter timeout if `overridable`. When it has passed, the request fails (DeadlineExceeded) or,
    if `delays`, is served after all requests of its class and higher ones whose timeout has not passed. `max_requests`
    bounds the requests queued; 0 means no bound.
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
        """Return whether a request may time out at all."""
        return self.timeout < math.inf or self.overridable


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """Bounds on the requests of each client. 0 means no bound.

    `max_requests`, `max_rows` and `max_bytes` bound what was accepted of a client and is not done. `rate` is in rows a
    second. `burst` is how many rows a client may send at once after a pause (0: those of a second, at least one). If
    `fair`, clients share the queue and the batches of a class by `weights`; a client that is not named there has 1.
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
        """Return whether any quota or rate is set."""
        return bool(self.max_requests or self.max_rows or self.max_bytes or self.rate)

    @property
    def most_at_once(self) -> float:
        """Return the rows that a client may send at once after a pause; inf if no rate is set."""
        if not self.rate:
            return math.inf
        return float(self.burst) if self.burst else max(1.0, self.rate)


@dataclass(frozen=True, slots=True)
class BatcherSettings:
    """The settings of a `Batcher`, which documents them. ValueError if one makes no sense, or two do not fit together.

    `default_priority` 0 becomes the lowest class. `devices` is how many batches may run at the same time, not counting
    the second of a pipelined device. A batch has at most `batch_rows` rows: `max_batch_size`, at least 1. If `sizes_pay`, a
    full batch has the rows that pay.
    """

    max_batch_size: int = 32
    max_queue_delay: float = 0.0
    preferred_batch_sizes: tuple[int, ...] = ()
    merge: bool = True
    priority_weights: tuple[int, ...] = (1,)
    strict_priorities: bool = False
    default_priority: int = 0
    policies: tuple[QueuePolicy, ...] = ()
    max_queue_size: int = 4096
    max_queue_bytes: int = 1 << 30
    devices: int = 1
    pipelined: bool = False
    steady: bool = True
    clients: ClientPolicy | None = None
    adaptive: bool = True
    learn_times: bool = True
    batch_rows: int = field(init=False, repr=False)
    sizes_pay: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for option, least in (
            ("max_batch_size", 0),
            ("max_queue_delay", 0),
            ("max_queue_size", 1),
            ("max_queue_bytes", 1),
            ("default_priority", 0),
        ):
            check_number(option, getattr(self, option), least)
        self._check_sizes()
        self._check_classes()
        object.__setattr__(self, "preferred_batch_sizes", tuple(sorted(set(self.preferred_batch_sizes))))
        if not self.default_priority:
            object.__setattr__(self, "default_priority", len(self.priority_weights))
        object.__setattr__(self, "batch_rows", max(1, self.max_batch_size))
        # What a smaller batch leaves would wait for the window again.
        windows = self.max_queue_delay or self.preferred_batch_sizes
        object.__setattr__(self, "sizes_pay", self.adaptive and self.merge and not windows)

    def _check_sizes(self) -> None:
        preferred = self.preferred_batch_sizes
        if preferred and not 1 <= min(preferred) <= max(preferred) <= self.max_batch_size:
            raise ValueError(
                f"preferred_batch_sizes is {preferred!r}; each must be from 1 to max_batch_size, {self.max_batch_size}"
            )
        if not self.merge and (self.max_queue_delay or preferred):
            raise ValueError(
                f"merge is false, so no batch waits for more; leave out max_queue_delay, {self.max_queue_delay!r}, and "
                f"preferred_batch_sizes, {preferred!r}"
            )

    def _check_classes(self) -> None:
        weights, policies = self.priority_weights, self.policies
        if not weights or min(weights) < 1:
            raise ValueError(f"priority_weights is {weights!r}; give each class at least 1")
        if self.default_priority > len(weights):
            raise ValueError(
                f"default_priority is {self.default_priority}; there are {len(weights)} classes, from 1, the highest"
            )
        if policies and len(policies) != len(weights):
            raise ValueError(
                f"policies has {len(policies)} entries; give each of the {len(weights)} classes one, or none at all"
            )
        if any(policy.delays for policy in policies) and len(weights) > 1 and not self.strict_priorities:
            raise ValueError(
                "a policy delays, which puts requests behind all of their class and above, but classes share by "
                "weights; give strict_priorities"
            )

    @property
    def ranks_per_class(self) -> int:
        """Return 2 if requests can be delayed by their queue policy, which puts them one rank lower, else 1."""
        return 2 if any(policy.delays and policy.expires for policy in self.policies) else 1

    @property
    def ranks(self) -> int:
        """Return the number of ranks of all classes."""
        return self.ranks_per_class * len(self.priority_weights)

    def warnings(self) -> Iterator[str]:
        """Yield why a full batch can never form, if the settings prevent it."""
        if self.max_queue_size < self.max_batch_size:
            yield (
                f"no batch can have more than {self.max_queue_size} rows, since no more can be queued; max_batch_size is "
                f"{self.max_batch_size}: raise max_queue_size to at least that"
            )


def check_number(option: str, value: float, least: int) -> None:
    """Raise ValueError unless a value is finite and at least `least`."""
    if not value >= least or math.isinf(value):
        raise ValueError(f"{option} is {value!r}; it must be at least {least} and finite")
