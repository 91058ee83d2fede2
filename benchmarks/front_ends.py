"""Cost and gain of front-end processes: `tensorferry serve --front-ends 0` to 4 on one machine.

    python benchmarks/front_ends.py --load PROGRAM [--quick] [--write PAGE]

All servers run at the same time, and the load alternates between them. Server and load share all cores. Ratios are to
the server with one process, in the same round; values are medians of the rounds. Peers that are installed take part with
the tiny model. The last part has the engine alone on
one core: this process sends tensors through links from another core, as front-ends do.
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine_alone import LINKS, engine_alone, engine_cpu_us
from sections import Section

from serving.load import LoadError, Shape, run_load
from serving.machine import describe
from serving.measure import Bench
from serving.plan import UNARY, Cell
from serving.processes import Cores, Running, busy_seconds, cpu_seconds, memory_mib
from serving.run import cache_folder
from serving.servers import HOST, LANE, MOSEC, TRITON, servers
from serving.workloads import TINY, Workload, write_models

SECTION = Section("<!-- front-ends: begin -->", "<!-- front-ends: end -->")
FRONT_ENDS = (0, 1, 2, 3, 4)
IN_FLIGHT = (1, 32, 256)
# Measured in the same rounds where they are installed.
PEERS = (TRITON, MOSEC)
CONNECTIONS = 16
IMAGE = Workload("150 KB", "identity", 37_500, "Identity of 150,000 bytes")
IMAGES_IN_FLIGHT = 32
SPREAD = (4, 16, 64)
# Modules of a server's processes; the process that the operator starts has none of them.
_ROLES = {
    "tensorferry.server.engine": "engine",
    "tensorferry.server.front_end": "front-ends",
}
_WARM_UP = 0.3
# Cores that other programs may use; a rate that was measured beside more is not compared.
_NOISY_CORES = 0.5
_ACCEPT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """One load on one server: processor time in microseconds per call by role; cores that other programs used."""

    rate: float
    p50_ms: float
    cpu_us: Mapping[str, float]
    other_cores: float


@dataclass(slots=True)
class Results:
    """Results of all rounds by what was asked and the number of front-ends, and figures that need no rounds."""

    loads: dict[tuple[str, int], list[Result]] = field(default_factory=lambda: defaultdict(list))
    # By the number of the round, because a peer may fail.
    peers: dict[tuple[str, str], dict[int, Result]] = field(default_factory=lambda: defaultdict(dict))
    memory: dict[int, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    spread: dict[tuple[int, int], Sequence[float]] = field(default_factory=dict)
    engine: list[tuple[float, float]] = field(default_factory=list)


def role_of(pid: int) -> str:
    """Return what a process of a server does."""
    with suppress(OSError):
        for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
            if word in _ROLES:
                return _ROLES[word]
    return "first process"


def by_role(serving: Running) -> Mapping[str, Sequence[int]]:
    """Return the processes of a server by role."""
    found: dict[str, list[int]] = defaultdict(list)
    for pid in serving.pids():
        found[role_of(pid)].append(pid)
    return found


def measure(
    bench: Bench, serving: Running, workload: Workload, in_flight: int, seconds: float, name: str = LANE
) -> Result:
    """Return the result of one load on a server of this name. SystemExit if a call fails."""
    server = servers()[name]
    load = bench.load_of(server, workload, serving.port, Cell(workload, UNARY, in_flight, seconds, _WARM_UP))
    if server.http is None:
        connections = min(CONNECTIONS, in_flight)
        load = replace(load, shape=Shape("unary", connections, in_flight // connections, 1))
    roles = by_role(serving)
    before: list[tuple[float, float, Mapping[str, float]]] = []

    def used() -> tuple[float, float, Mapping[str, float]]:
        return (
            time.monotonic(),
            sum(busy_seconds()),
            {role: cpu_seconds(pids) for role, pids in roles.items()},
        )

    measured = run_load(bench.program, load, lambda: before.append(used()), core=bench.cores.of_load())
    (began, busy_before, cpu_before), (ended, busy_after, cpu_after) = before[0], used()
    if measured.errors or measured.unanswered:
        raise SystemExit(f"{measured.errors} errors; the last: {measured.last_message}")
    spent = {role: cpu_after[role] - cpu_before[role] for role in roles}
    others = busy_after - busy_before - sum(spent.values()) - measured.cpu_seconds
    calls = measured.rate * (ended - began)
    return Result(
        measured.rate,
        measured.p50_ms,
        {role: 1e6 * seconds_used / calls for role, seconds_used in spent.items()},
        max(0.0, others / (ended - began)),
    )


def spread_of(serving: Running, connections: int) -> float:
    """Return the share of connections that the busiest front-end has."""
    pids = by_role(serving)["front-ends"]
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection((HOST, serving.port))) for _ in range(connections)
        ]
        until = time.monotonic() + _ACCEPT_SECONDS
        clients = {client.getsockname()[1] for client in opened}
        while time.monotonic() < until:
            inodes = _accepted(serving.port, clients)
            counts = [_sockets(pid, inodes) for pid in pids]
            if sum(counts) == connections:
                return max(counts) / connections
    raise SystemExit(f"only {sum(counts)} of {connections} connections were accepted")


def _accepted(port: int, clients: set[int]) -> set[str]:
    """Return the inodes of the server's sockets that are connected to these ports."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            ours, theirs = (int(address.rpartition(":")[2], 16) for address in words[1:3])
            if ours == port and theirs in clients:
                found.add(words[9])
    return found


def _sockets(pid: int, inodes: set[str]) -> int:
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            name = os.readlink(link)
            count += name.startswith("socket:[") and name[8:-1] in inodes
    return count


def run(bench: Bench, rounds: int, seconds: float, trials: int) -> Results:
    """Measure everything."""
    results = Results()
    for workload, in_flights in ((TINY, IN_FLIGHT), (IMAGE, (IMAGES_IN_FLIGHT,))):
        with ExitStack() as stack:
            started = {
                count: stack.enter_context(
                    bench.started(servers()[LANE], workload, "--front-ends", str(count))
                )[0]
                for count in FRONT_ENDS
            }
            peers = {
                name: stack.enter_context(bench.started(servers()[name], workload))[0]
                for name in PEERS
                if workload is TINY and servers()[name].installed(bench.cache)
            }
            for number in range(rounds):
                for in_flight in in_flights:
                    # The order alternates, so that a drift of the machine affects all alike.
                    for count in FRONT_ENDS[:: -1 if number % 2 else 1]:
                        result = measure(bench, started[count], workload, in_flight, seconds)
                        results.loads[_asked(workload, in_flight), count].append(result)
                        print(f"{_asked(workload, in_flight)}, {count} front-ends: {result}", flush=True)
                    for name, serving in peers.items():
                        try:
                            result = measure(bench, serving, workload, in_flight, seconds, name)
                        except LoadError as error:
                            print(f"{_asked(workload, in_flight)}, {name} FAILED: {error}", flush=True)
                            continue
                        results.peers[_asked(workload, in_flight), name][number] = result
                        print(f"{_asked(workload, in_flight)}, {name}: {result}", flush=True)
            if workload is IMAGE:
                continue
            for count, serving in started.items():
                results.memory[count] = {
                    role: [memory_mib([pid]) for pid in pids] for role, pids in by_role(serving).items()
                }
                if count > 1:
                    for connections in SPREAD:
                        results.spread[count, connections] = [
                            spread_of(serving, connections) for _ in range(trials)
                        ]
    run_engine_alone(bench, results, rounds, seconds)
    return results


def run_engine_alone(bench: Bench, results: Results, rounds: int, seconds: float) -> None:
    """Measure the engine alone and a server of one process, each on the same core."""
    cores = Cores.split()
    alone = replace(bench, cores=cores)
    with (
        alone.started(servers()[LANE], TINY) as (serving, _),
        engine_alone(TINY.path(bench.cache), cores.server) as (pid, links),
    ):
        for _ in range(rounds):
            one = measure(alone, serving, TINY, IN_FLIGHT[-1], seconds).cpu_us["first process"]
            allowed = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {cores.load})
            try:
                engine = engine_cpu_us(pid, links, IN_FLIGHT[-1], seconds)
            finally:
                os.sched_setaffinity(0, allowed)
            results.engine.append((one, engine))
            print(f"one core: server {one:.1f} us, engine alone {engine:.1f} us", flush=True)


def _asked(workload: Workload, in_flight: int) -> str:
    return f"{workload.name}, {in_flight} in flight"


def page(results: Results, bench: Bench, command: str) -> str:
    """Return the section of the page."""
    machine = describe(bench.cache)
    results_of = [result for found in results.loads.values() for result in found]
    lines = [
        f"`{command}`, {datetime.date.today()}, {machine['processor']}, {machine['cores']} cores that server and load "
        f"share. Other programs used {statistics.median(each.other_cores for each in results_of):.2f} cores (median), "
        f"{max(each.other_cores for each in results_of):.2f} at most; {_versions(machine)}.",
    ]
    for asked in dict.fromkeys(asked for asked, _ in results.loads):
        lines += ["", f"{asked}:", ""]
        lines += [
            "| front-ends | quiet rounds | ratio of calls/s | more ms (p50) | calls/s | p50 ms | CPU us a call |"
        ]
        lines += ["|---:|---:|---:|---:|---:|---:|---|"]
        base = results.loads[asked, 0]
        for count in FRONT_ENDS:
            found = results.loads[asked, count]
            quiet = [
                (each, other)
                for each, other in zip(found, base, strict=True)
                if max(each.other_cores, other.other_cores) < _NOISY_CORES
            ]
            ratios = [each.rate / other.rate for each, other in quiet]
            more = [each.p50_ms - other.p50_ms for each, other in quiet]
            cpu = ", ".join(
                f"{role} {statistics.median(each.cpu_us[role] for each in found):.1f}"
                for role in found[0].cpu_us
            )
            compared = (
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) "
                f"| {statistics.median(more):+.3f} "
                f"| {statistics.median(each.rate for each, _ in quiet):,.0f} "
                f"| {statistics.median(each.p50_ms for each, _ in quiet):.3f}"
                if quiet
                else "too noisy | too noisy | too noisy | too noisy"
            )
            lines.append(f"| {count} | {len(quiet)} of {len(found)} | {compared} | {cpu} |")
    lines += peer_lines(results)
    lines += ["", "Memory (Pss) after these loads, MiB for each process:", ""]
    lines += ["| front-ends | processes | sum |", "|---:|---|---:|"]
    for count, roles in results.memory.items():
        said = "; ".join(f"{role} {', '.join(f'{mib:.0f}' for mib in mibs)}" for role, mibs in roles.items())
        lines.append(f"| {count} | {said} | {sum(map(sum, roles.values())):.0f} |")
    lines += [
        "",
        "Share of the connections that the busiest front-end has (the kernel assigns each by a hash):",
        "",
    ]
    lines += ["| front-ends | connections | median | most | even |", "|---:|---:|---:|---:|---:|"]
    for (count, connections), shares in results.spread.items():
        lines.append(
            f"| {count} | {connections} | {statistics.median(shares):.2f} | {max(shares):.2f} | {1 / count:.2f} |"
        )
    ratios = [one / engine for one, engine in results.engine]
    one, engine = (statistics.median(values) for values in zip(*results.engine, strict=True))
    lines += [
        "",
        f"The engine alone on one core, fed through {LINKS} links from another, {IN_FLIGHT[-1]} in flight: "
        f"{engine:.1f} us of processor time a request, {1e6 / engine:,.0f} requests for each second of it. A server of "
        f"one process on that core: {one:.1f} us, {1e6 / one:,.0f} calls. Ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} - {max(ratios):.2f}).",
    ]
    return "\n".join(lines)


def peer_lines(results: Results) -> Sequence[str]:
    """Return the table of peers; nothing if none is installed."""
    if not results.peers:
        return ()
    lines = [
        "",
        "Peers, which may use all cores as well; ratios are those of our best number of front-ends:",
        "",
    ]
    lines += [
        "| load | peer | rounds it answered | front-ends | our calls/s ÷ theirs | their calls/s | their CPU us a call |"
    ]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    for (asked, name), found in results.peers.items():
        best = max(FRONT_ENDS, key=lambda count: _median_rate(results.loads[asked, count]))
        ours = results.loads[asked, best]
        ratios = [ours[number].rate / their.rate for number, their in found.items()]
        theirs = list(found.values())
        cpu = statistics.median(sum(each.cpu_us.values()) for each in theirs)
        lines.append(
            f"| {asked} | {name} | {len(found)} of {len(ours)} | {best} | {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) "
            f"| {_median_rate(theirs):,.0f} | {cpu:.1f} |"
        )
    return lines


def _median_rate(results: Sequence[Result]) -> float:
    return statistics.median(result.rate for result in results)


def _versions(machine: Mapping[str, object]) -> str:
    versions = machine["versions"]
    assert isinstance(versions, dict)
    return f"Python {machine['python']}, grpcio {versions['grpcio']}, onnxruntime {versions['onnxruntime']}"


def main() -> None:
    """Measure and print the section, and write it into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=Path, required=True, help="the load generator, built by make")
    parser.add_argument("--quick", action="store_true", help="a minute, for whether it works")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page whose section is replaced")
    arguments = parser.parse_args()
    cache = cache_folder()
    write_models(cache)
    bench = Bench(cache, arguments.load.resolve(), replace(Cores.split(), shared=True))
    rounds, seconds, trials = (2, 0.4, 5) if arguments.quick else (3, 1.0, 20)
    results = run(bench, rounds, seconds, trials)
    text = page(results, bench, "make bench-front-ends" + (" QUICK=1" if arguments.quick else ""))
    print(text)
    if arguments.write:
        arguments.write.write_text(SECTION.replaced(arguments.write.read_text(), text))


if __name__ == "__main__":
    main()
