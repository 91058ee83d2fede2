"""Full measurement of one workload: the bare loop, and every server in a closed and an open loop.

The loop and all servers stay up and take turns, because the machine's speed drifts: compared
figures are measured in the same round, and every other round is reversed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from real_server import ServerError

from gpu.accounting import Account, Snapshot
from gpu.cores import Layout
from gpu.load import Load, Outcome
from gpu.loop import Loop, Timed, best_rate, chosen_size, fastest_size
from gpu.peak import PeakSearch, stepped_down
from gpu.servers import (
    DEFAULT,
    VARIANTS,
    Server,
    Variant,
    serving,
    warm_up,
    why_not,
)
from gpu.workloads import Workload
from serving.load import LoadError

# Requests in flight in the closed loop, in batches: two on the GPU, one that waits, one on the
# wire.
_OFFLINE_BATCHES = 4
_LEAST_IN_FLIGHT = 16
_LEAD_IN_SECONDS = 1.0
# Shares of a plan's seconds, after which only searched servers are started, and by which a round
# must end.
_STARTS, _ROUNDS = 0.4, 0.6
# Shares of the seconds for warming up. An Offline server has full batches, which come first. For
# the others all sizes must be warm, or cuDNN's search for missing sizes would decide the 99th
# percentile.
_SATURATED = 0.15
# Seconds of a run beside its own, and of the final report.
_RUN_SECONDS, _LAST_SECONDS = 2.0, 10.0

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Number and seconds of runs.

    Everything must be over after `seconds`: what does not fit is left out, and reported so. Most of
    the time is for the open loop.
    """

    rounds: int
    seconds: float
    warm_up_seconds: float
    loop_seconds: float
    offline_seconds: float
    probes: int
    probe_seconds: float
    confirm_seconds: float
    confirmations: int


QUICK = Plan(
    rounds=1,
    seconds=math.inf,
    warm_up_seconds=5.0,
    loop_seconds=0.1,
    offline_seconds=1.5,
    probes=3,
    probe_seconds=1.5,
    confirm_seconds=2.0,
    confirmations=2,
)
ON_CPU = Plan(
    rounds=3,
    seconds=math.inf,
    warm_up_seconds=10.0,
    loop_seconds=0.3,
    offline_seconds=5.0,
    probes=6,
    probe_seconds=5.0,
    confirm_seconds=10.0,
    confirmations=4,
)
# Within nine minutes, with the servers' start, for machines where a command may run for ten.
ON_GPU = Plan(
    rounds=3,
    seconds=540.0,
    warm_up_seconds=35.0,
    loop_seconds=0.3,
    offline_seconds=6.0,
    probes=6,
    probe_seconds=6.0,
    confirm_seconds=12.0,
    confirmations=2,
)


@dataclass(frozen=True, slots=True)
class _Served:
    """A server under measurement, with its load."""

    server: Server
    load: Load
    most: int

    @property
    def name(self) -> str:
        return self.server.variant.name

    @property
    def searched(self) -> bool:
        return self.server.variant.searched

    @property
    def in_flight(self) -> int:
        return max(_LEAST_IN_FLIGHT, _OFFLINE_BATCHES * self.most)


class Part:
    """Measures a workload; `results` grows meanwhile, and `keep` is called whenever it should be
    saved.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        device: str,
        layout: Layout,
        program: Path,
        say: Callable[[str], None],
    ) -> None:
        self._workload = workload
        self._plan = plan
        self._device = device
        self._layout = layout
        self._program = program
        self._say = say
        self.keep: Callable[[], None] = lambda: None
        self._began = time.monotonic()
        self._most = self._fastest = 1
        self._copies: tuple[bool, ...] = (False,) if device == "cpu" else (False, True)
        self.results: dict[str, Any] = {
            "loop": [], "offline": [], "server": [], "peaks": {}, "skipped": {}, "warnings": {},
        }  # fmt: skip

    def run(self, cache: Path, folder: Path) -> None:
        """Run everything. Files go to the folder; ServerError, LoadError or LoopError say what failed."""
        workload, self._began = self._workload, time.monotonic()
        path = workload.write(cache)
        self._say(f"{workload.title}, on {self._device}; {self._layout}")
        with ExitStack() as stack:
            loop = stack.enter_context(
                Loop(path, workload, self._device, self._layout.server, folder / "loop.log")
            )
            # The first runs of a size, with cuDNN's search, must not decide.
            self._ladder(loop)
            times = self._ladder(loop)
            self._most = self.results["max_batch_size"] = chosen_size(times, workload.bound)
            self._fastest = self.results["fastest_size"] = fastest_size(times)
            self._say(
                f"bare loop: {best_rate(times):.0f} rows/s at best, in batches of {self._fastest}; with "
                f"{workload.bound * 1e3:.0f} ms for a request the servers form batches of up to {self._most}"
            )
            expected = loop.outputs(0)
            served = []
            for variant in self._variants():
                if not variant.searched and self._elapsed() > _STARTS * self._plan.seconds:
                    self._skip(variant, "there was no time to start it")
                    continue
                try:
                    served.append(self._start(variant, path, expected, folder, stack))
                except (ServerError, LoadError) as error:
                    # The comparisons with the default server can still be made.
                    if variant is DEFAULT:
                        raise
                    self.results["skipped"][variant.name] = str(error)
                    self._say(f"{variant.name}: FAILED: {error}")
            longest = 0.0
            for number in range(self._plan.rounds):
                at = self._elapsed()
                if number and at + longest > _ROUNDS * self._plan.seconds:
                    self._say(f"no time for another round: {number} of {self._plan.rounds} are done")
                    break
                self._round(number, loop, served if number % 2 == 0 else served[::-1])
                longest = max(longest, self._elapsed() - at)
                self.keep()
            self._search([one for one in served if one.searched])
            for one in served:
                # For example that it runs without CUDA graphs.
                self.results["warnings"][one.name] = one.server.warnings()
        self.results["minutes"] = round(self._elapsed() / 60, 1)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _left(self) -> float:
        return self._plan.seconds - self._elapsed()

    def _skip(self, variant: Variant, why: str) -> None:
        self.results["skipped"][variant.name] = why
        self._say(f"{variant.name}: not measured, {why}")

    def _variants(self) -> Sequence[Variant]:
        wanted: list[Variant] = []
        for variant in VARIANTS:
            if why := why_not(variant, self._device, same_size=self._most == self._fastest):
                self._skip(variant, why)
            else:
                wanted.append(variant)
        return wanted

    def _start(
        self,
        variant: Variant,
        path: Path,
        expected: Mapping[str, Sequence[float]],
        folder: Path,
        stack: ExitStack,
    ) -> _Served:
        workload, began = self._workload, time.monotonic()
        most = self._fastest if variant.unbounded else self._most
        server = stack.enter_context(
            serving(variant, workload, path, self._device, most, self._layout.server)
        )
        seconds = self._plan.warm_up_seconds * (1 if variant.searched else _SATURATED)
        difference, cold = warm_up(server, workload, most, expected, seconds)
        load = Load.of(self._program, self._layout.load, server.address, workload, folder)
        ready = _Served(server, load, most)
        load.offline(_LEAD_IN_SECONDS, ready.in_flight)
        self._say(
            f"{ready.name}: {server.words}, answers within {difference:.1e} of ONNX Runtime's, ready after "
            f"{time.monotonic() - began:.0f} s"
            + (f"; no time to warm up {cold} of the sizes" if cold else "")
        )
        return ready

    def _ladder(self, loop: Loop, number: int = -1) -> list[Timed]:
        """Run the bare loop at each size; without a round before the first."""
        times = [
            loop.timed(rows, self._plan.loop_seconds, copies=copies)
            for rows in self._workload.sizes
            for copies in self._copies
        ]
        self.results["loop"] += [{"round": number, **asdict(timed)} for timed in times]
        return times

    def _round(self, number: int, loop: Loop, served: Sequence[_Served]) -> None:
        if number % 2 == 0:
            self._ladder(loop, number)
        for one in served:
            self._offline(number, one)
        if number % 2:
            self._ladder(loop, number)

    def _offline(self, number: int, one: _Served) -> None:
        first = self._snapshot(one)
        outcome = one.load.offline(self._plan.offline_seconds, one.in_flight)
        account = Account.between(first, self._snapshot(one))
        ceiling = best_rate([_timed(row) for row in self.results["loop"] if row["round"] in (number, -1)])
        row = {"round": number, "variant": one.name, **asdict(outcome), "account": asdict(account)}
        self.results["offline"].append(row)
        self._say(
            f"round {number + 1}, Offline, {one.name}: {outcome.rate:.0f}/s, of the loop's best before "
            f"{outcome.rate / ceiling:.2f}; batches of {account.rows:.1f}, device busy {account.busy:.0%}"
            + (f", {outcome.errors} ERRORS" if outcome.errors else "")
        )

    def _search(self, served: Sequence[_Served]) -> None:
        """Search the highest rates within the bound; the servers' searches take turns."""
        searches = {one.name: PeakSearch(self._offline_rate(one.name)) for one in served}
        once = len(served) * (self._plan.probe_seconds + _RUN_SECONDS)
        confirming = len(served) * (self._plan.confirm_seconds + _RUN_SECONDS) + _LAST_SECONDS
        for number in range(self._plan.probes):
            if number and self._left() < once + confirming:
                self._say(f"no time to search on: {number} of {self._plan.probes} rates are tried")
                break
            for one in served:
                search = searches[one.name]
                search.record(self._probe(one, search.rate, self._plan.probe_seconds))
            self.keep()
        for one in served:
            self._confirm(one, searches[one.name].best)

    def _confirm(self, one: _Served, rate: float) -> None:
        """Run the found rate for longer; lower it until it meets the bound again."""
        for number in range(self._plan.confirmations):
            if number and self._left() < self._plan.confirm_seconds + _RUN_SECONDS + _LAST_SECONDS:
                self._say(f"{one.name}: no time to confirm {rate:.0f}/s")
                return
            if not rate:
                break
            if self._probe(one, rate, self._plan.confirm_seconds, confirms=True):
                self.results["peaks"][one.name] = self.results["server"][-1]
                return
            rate = stepped_down(rate)
        self._say(f"{one.name}: no rate met the bound when it was run again")

    def _probe(self, one: _Served, rate: float, seconds: float, *, confirms: bool = False) -> bool:
        first = self._snapshot(one)
        outcome = one.load.server(rate, seconds)
        account = Account.between(first, self._snapshot(one))
        met = outcome.met(self._workload.bound)
        row = {
            "variant": one.name,
            "confirms": confirms,
            "met": met,
            **asdict(outcome),
            "account": asdict(account),
        }
        self.results["server"].append(row)
        self._say(_line(one.name, outcome, account, met))
        return met

    def _offline_rate(self, name: str) -> float:
        return median(float(row["rate"]) for row in self.results["offline"] if row["variant"] == name)

    def _snapshot(self, one: _Served) -> Snapshot:
        return Snapshot.of(one.server.address, self._workload.name, one.server.process.pid)


def _timed(row: Row) -> Timed:
    return Timed(row["rows"], row["copies"], row["rate"], row["batch_seconds"])


def _line(name: str, outcome: Outcome, account: Account, met: bool) -> str:
    errors = f", {outcome.errors} ERRORS" if outcome.errors else ""
    return (
        f"Server, {name}: {outcome.target:.0f}/s asked, {outcome.rate:.0f}/s done, p99 {outcome.p99 * 1e3:.1f} ms, "
        f"{'met' if met else 'missed'}; batches of {account.rows:.1f}, device busy {account.busy:.0%}{errors}"
    )
