"""Discrete-event simulation: arrivals, ends of batches and timers drive a scheduler in virtual time.

A batch goes through three stages: the host prepares it, its device runs it, the host completes it.
The host handles any number of batches at once; a device runs one after the other.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from costs import Noise
from scenarios import Scenario
from traces import Trace

# As many as in the server.
# A load runs batches of these rows, each at least this often.
WARMUP_ROWS = (1, 2)
WARMUP_RUNS = 2


class Step(NamedTuple):
    """A scheduler's decision. Requests are numbers of the trace.

    Without a batch and without drops it waits, for an event or until that time.
    """

    batch: Sequence[int] = ()
    dropped: Sequence[int] = ()
    until: float = math.inf


class Times(NamedTuple):
    """Seconds of each stage of a batch."""

    before: float
    device: float
    after: float


class Scheduler(Protocol):
    """A scheduler under test: the shipping queue or a peer."""

    @property
    def polls_busy(self) -> bool:
        """Whether it is also polled while all workers are busy."""

    @property
    def in_flight(self) -> int:
        """The most batches of each device in all stages: its workers."""

    def anchor(self, key: int, rows: int, seconds: float) -> None:
        """Learn a warm-up run of a bucket."""

    def put(self, index: int, now: float) -> bool:
        """Accept or refuse a request; return whether it was accepted."""

    def poll(self, now: float, device: int | None) -> Step:
        """Decide after an event, for a device with a free worker; None if no device has one."""

    def released(self, device: int, now: float) -> None:
        """Note that a device has run a batch; the host has yet to complete it."""

    def ran(self, batch: Sequence[int], device: int, times: Times, now: float) -> None:
        """Note that a batch is completed."""


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of each request, the time at which it was answered or dropped (else nan); the rows of batches.

    `busy` is the seconds that devices ran batches. `idle` is the seconds that they were idle although
    a request could have been prepared by then. `early` is the mean time that a prepared batch waited
    for its device.
    """

    answered: list[float]
    dropped: list[float]
    batches: list[int]
    busy: float
    idle: float = 0.0
    early: float = 0.0


@dataclass(slots=True)
class _Flight:
    """A batch in flight: its times, and when it was prepared."""

    device: int
    batch: Sequence[int]
    times: Times
    ready: float
    completing: bool = False


@dataclass(slots=True)
class _Device:
    """A device: free workers, prepared batches that wait, and since when it is idle."""

    workers: int
    waiting: deque[_Flight] = field(default_factory=deque)
    running: _Flight | None = None
    free_since: float = -math.inf


class _Devices:
    """All devices and the batches on them."""

    def __init__(self, trace: Trace, scenario: Scenario, scheduler: Scheduler, noise: Noise) -> None:
        self._trace = trace
        self._scenario = scenario
        self._scheduler = scheduler
        self._noise = noise
        self._devices = [_Device(scheduler.in_flight) for _ in range(scenario.devices)]
        # The next event of each batch in flight; numbers break ties.
        self._events: list[tuple[float, int, _Flight]] = []
        self._number = 0
        self.batches: list[int] = []
        # Of batches that were dispatched and have not run.
        self.dropped: list[int] = []
        self.busy = self.idle = self.early = 0.0

    def next_event(self) -> float:
        """Return the time of the next event; inf for none."""
        return self._events[0][0] if self._events else math.inf

    def free(self) -> list[int]:
        """Return the devices with a free worker, idle ones first, as the product wakes its workers."""
        limit = self._scheduler.in_flight
        free = [number for number, device in enumerate(self._devices) if device.workers]
        if len(free) > 1:
            free.sort(key=lambda number: (self._devices[number].workers < limit, -number))
        return free

    def send(self, device: int, batch: Sequence[int], now: float) -> None:
        """Dispatch a batch to a device."""
        scenario, rows, key = self._scenario, len(batch), self._trace.keys[batch[0]]
        stages = (scenario.before(rows), scenario.cost(rows, key), scenario.after(rows))
        times = Times(*(seconds * self._noise() if seconds else 0.0 for seconds in stages))
        self._devices[device].workers -= 1
        flight = _Flight(device, batch, times, now + times.before)
        if times.before:
            self._push(flight.ready, flight)
        else:
            self._prepared(flight, now)

    def advance(self, now: float) -> Sequence[int]:
        """Process the next event; return the requests that it answers."""
        flight = heapq.heappop(self._events)[2]
        device = self._devices[flight.device]
        if flight.completing:
            return self._complete(flight, now)
        if device.running is not flight:
            self._prepared(flight, now)
            return ()
        device.running, device.free_since = None, now
        self._scheduler.released(flight.device, now)
        if device.waiting:
            self._start(device.waiting.popleft(), now)
        if not flight.times.after:
            return self._complete(flight, now)
        flight.completing = True
        self._push(now + flight.times.after, flight)
        return ()

    def _prepared(self, flight: _Flight, now: float) -> None:
        device = self._devices[flight.device]
        if device.running is None:
            self._start(flight, now)
        else:
            device.waiting.append(flight)

    def _start(self, flight: _Flight, now: float) -> None:
        device = self._devices[flight.device]
        device.running = flight
        self.batches.append(len(flight.batch))
        self.busy += flight.times.device
        oldest = min(map(self._trace.arrivals.__getitem__, flight.batch))
        self.idle += now - max(device.free_since, oldest + flight.times.before)
        self.early += now - flight.ready
        self._push(now + flight.times.device, flight)

    def _complete(self, flight: _Flight, now: float) -> Sequence[int]:
        self._devices[flight.device].workers += 1
        self._scheduler.ran(flight.batch, flight.device, flight.times, now)
        return flight.batch

    def _push(self, time: float, flight: _Flight) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, flight))


def run(
    trace: Trace,
    scenario: Scenario,
    scheduler: Scheduler,
    noise: Noise,
    known_rows: Sequence[int] = WARMUP_ROWS,
) -> Run:
    """Simulate a trace until every request is answered or dropped.

    The scheduler knows the times of batches of `known_rows` rows: by default those of a load, else of earlier traffic.
    """
    _warm_up(scenario, scheduler, noise, known_rows)
    arrivals = trace.arrivals
    count = len(arrivals)
    answered = [math.nan] * count
    dropped = [math.nan] * count
    devices = _Devices(trace, scenario, scheduler, noise)
    arrived = 0
    timer = math.inf
    while True:
        arrival = arrivals[arrived] if arrived < count else math.inf
        event = devices.next_event()
        now = min(arrival, event, timer)
        if now == math.inf:
            break
        if now == arrival:
            if not scheduler.put(arrived, now):
                dropped[arrived] = now
            arrived += 1
        elif now == event:
            for index in devices.advance(now):
                answered[index] = now
            for index in devices.dropped:
                dropped[index] = now
            devices.dropped.clear()
        timer = _poll(devices, scheduler, now, dropped)
    lost = sum(math.isnan(a) == math.isnan(d) for a, d in zip(answered, dropped, strict=True))
    if lost:
        raise RuntimeError(f"{lost} of {count} requests were not answered or dropped exactly once")
    early = devices.early / max(1, len(devices.batches))
    return Run(answered, dropped, devices.batches, devices.busy, devices.idle, early)


def _poll(devices: _Devices, scheduler: Scheduler, now: float, dropped: list[float]) -> float:
    """Poll for every free worker until no batch is closed; return when to poll again."""
    while True:
        timer = math.inf
        asked: list[int | None] = [*devices.free()]
        if not asked and scheduler.polls_busy:
            asked.append(None)
        for device in asked:
            step = scheduler.poll(now, device)
            while step.dropped and not step.batch:
                _drop(step, now, dropped)
                step = scheduler.poll(now, device)
            _drop(step, now, dropped)
            if step.batch and device is not None:
                devices.send(device, step.batch, now)
                break
            timer = min(timer, step.until)
        else:
            return timer


def _drop(step: Step, now: float, dropped: list[float]) -> None:
    for index in step.dropped:
        dropped[index] = now


def _warm_up(scenario: Scenario, scheduler: Scheduler, noise: Noise, known_rows: Sequence[int]) -> None:
    for key in range(len(scenario.cost.scales)):
        for rows in known_rows:
            scheduler.anchor(key, rows, min(scenario.cost(rows, key) * noise() for _ in range(WARMUP_RUNS)))
