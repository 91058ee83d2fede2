"""Jobs: each simulates one number of the tables, in any process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import costs
from clairvoyant import fewest_misses
from engine import Scheduler, run
from policies import PEERS, FourEager, NexusByDeadline, Peer, StrictPriority, TwoEager
from scenarios import Scenario, TwoStages
from shipping import Shipping
from stages import run_stages
from summary import Summary, summarize
from traces import Trace

OPTIMUM = "clairvoyant optimum"
OTHERS: tuple[type[Peer], ...] = (*PEERS, NexusByDeadline)
# Used only by the tables about several batches in flight and about classes.
SPECIAL: tuple[type[Peer], ...] = (TwoEager, FourEager, StrictPriority)
BLIND = "tensorferry, deadlines not passed on"
SERIAL = "tensorferry, not pipelined"
ALWAYS_MAX = "tensorferry, batches up to the maximum"
BLIND_ALWAYS_MAX = f"{ALWAYS_MAX}, deadlines not passed on"


def weighted(*weights: int) -> str:
    """Return the shipping queue's name with these class weights."""
    return f"tensorferry {':'.join(map(str, weights))}"


WEIGHTS = ((8, 1), (3, 1), (1, 1))
SCHEDULERS: dict[str, Callable[[Scenario, Trace], Scheduler]] = {
    Shipping.name: Shipping,
    **{peer.name: peer for peer in (*OTHERS, *SPECIAL)},
    BLIND: partial(Shipping, deadlines=False),
    SERIAL: partial(Shipping, pipelined=False),
    ALWAYS_MAX: partial(Shipping, adaptive=False),
    BLIND_ALWAYS_MAX: partial(Shipping, adaptive=False, deadlines=False),
    **{weighted(*weights): partial(Shipping, weights=weights) for weights in WEIGHTS},
}
GOODPUT_SHARE = 0.99

# The study's noise on batch times, rougher noise, and none.
NoiseKind = Literal["study", "rough", "none"]


@dataclass(frozen=True, slots=True)
class Job:
    """One policy on one trace: a run at a load, or without a load the search for goodput@99 %."""

    scenario: Scenario
    policy: str
    seed: int
    count: int
    load: float | None = None
    noise: NoiseKind = "study"
    searches: int = 9


def noise_of(job: Job) -> costs.Noise:
    """Return the factors on batch times, equal for policies that run equally many batches."""
    if job.noise == "none":
        return costs.silent
    if job.noise == "rough":
        return costs.noise(job.seed, sigma=0.1, stalls=0.01)
    return costs.noise(job.seed)


def measure(job: Job, load: float) -> Summary:
    """Run the job's policy at a load."""
    scenario = job.scenario
    trace = scenario.trace(load, job.count, job.seed)
    if job.policy == OPTIMUM:
        misses = fewest_misses(trace.arrivals, scenario.tightest, scenario.cost, scenario.max_batch_size)
        assert misses is not None
        in_time = 1 - misses / job.count
        return Summary(in_time, in_time * job.count / trace.duration)
    if isinstance(scenario, TwoStages):
        return summarize(trace, run_stages(trace, scenario, job.policy, noise_of(job)))
    scheduler = SCHEDULERS[job.policy](scenario, trace)
    return summarize(trace, run(trace, scenario, scheduler, noise_of(job)))


def sustains(job: Job, load: float) -> bool:
    """Return whether the policy answers 99 % of all requests in time at a load."""
    if job.policy != OPTIMUM:
        return measure(job, load).in_time >= GOODPUT_SHARE
    scenario = job.scenario
    arrivals = scenario.trace(load, job.count, job.seed).arrivals
    limit = int((1 - GOODPUT_SHARE) * job.count)
    return (
        fewest_misses(arrivals, scenario.tightest, scenario.cost, scenario.max_batch_size, limit) is not None
    )


def goodput(job: Job) -> float:
    """Return the highest load that the policy sustains, as a share of the offline rate, by bisection."""
    low, high = 0.02, 1.0
    for _ in range(job.searches):
        middle = (low + high) / 2
        if sustains(job, middle):
            low = middle
        else:
            high = middle
    return low


def _do(job: Job) -> float | Summary:
    return goodput(job) if job.load is None else measure(job, job.load)


class Results:
    """Outcomes of jobs, each run once, on all cores; means over their seeds."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._done: dict[Job, float | Summary] = {}

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs that have not run yet; outcomes do not depend on the number of cores."""
        new = [job for job in dict.fromkeys(jobs) if job not in self._done]
        with ProcessPoolExecutor(self._processes) as pool:
            self._done.update(zip(new, pool.map(_do, new, chunksize=4), strict=True))

    def goodputs(self, jobs: Sequence[Job]) -> list[float]:
        """Return each job's goodput@99 %."""
        return [value for job in jobs if isinstance(value := self._done[job], float)]

    def summary(self, jobs: Sequence[Job]) -> Summary:
        """Return the mean of the jobs' summaries."""
        return Summary.average([value for job in jobs if isinstance(value := self._done[job], Summary)])
