"""Cost of metrics, tracing, authentication and limits: throughput with and without them.

    python -m serving.observability --load PROGRAM [--quick] [--transport lane|threaded] [--only NAME]

For each variant two servers run side by side on one core, one plain and one with the variant. The
load alternates between them, with one caller and with many, within the same minute. The table has
calls per second, the server's processor time per call (medians of the rounds), and the median of
each round's ratio. The first variant is plain too: the distance of its ratios from 1 is the
resolution of the measurement.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from serving.measure import Bench
from serving.plan import UNARY, Cell
from serving.processes import Cores, Running
from serving.run import cache_folder
from serving.servers import HOST, LANE, THREADED, servers
from serving.workloads import TINY, write_models

_CALLERS = (1, 64)
_SCRAPE_SECONDS = 1.0
# Placeholder in flags for a port of the server, beside that of gRPC.
_METRICS_PORT = "{metrics}"
_TOKENS = 8
_TRACED = ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Variant:
    """Flags of a server and headers of each call; if `scraped`, its metrics are read each second."""

    name: str
    flags: Sequence[str] = ()
    headers: Headers = ()
    scraped: bool = False


_METRICS = ("--metrics-port", _METRICS_PORT)


def variants(folder: Path) -> Sequence[Variant]:
    """Return all variants; their files are written to the folder."""
    tokens = folder / "tokens"
    # One token of many, as on a platform with a token for each service.
    made = [_token(tokens, f"service-{number}") for number in range(_TOKENS)]
    authentication = ("--auth-tokens", str(tokens))
    bearer = ("authorization", f"Bearer {made[_TOKENS // 2]}")
    return (
        Variant("nothing, as a check"),
        Variant("metrics", _METRICS, scraped=True),
        Variant("metrics, calls with a trace", _METRICS, (_TRACED,), scraped=True),
        # The size that gRPC itself needs for such a header.
        Variant("a token that is never asked for", (), (bearer,)),
        Variant("authentication by token", authentication, (bearer,)),
        Variant("metrics and authentication", (*_METRICS, *authentication), (bearer,), scraped=True),
    )


def _token(file: Path, name: str) -> str:
    words = [sys.executable, "-m", "tensorferry.server", "token", name, "--file", str(file)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def scraping(port: int | None) -> Iterator[None]:
    """Read the metrics at the address each second, as Prometheus does; None reads nothing."""
    if port is None:
        yield
        return
    over = threading.Event()
    asked = urllib.request.Request(
        f"http://{HOST}:{port}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
    )
    failures: list[BaseException] = []

    def scrape() -> None:
        try:
            while True:
                with urllib.request.urlopen(asked, timeout=10) as response:
                    response.read()
                if over.wait(_SCRAPE_SECONDS):
                    return
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=scrape, name="scrape")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failures:
        raise SystemExit(f"the metrics cannot be read: {failures[0]}")


@dataclass(frozen=True, slots=True)
class Shown:
    """Figures of one server in one round."""

    rate: float
    cpu_us: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians without and with the variant, and the median of each round's ratio."""

    without: Shown
    given: Shown
    rate_ratio: float
    cpu_ratio: float


def compared(pairs: Sequence[tuple[Shown, Shown]]) -> Comparison:
    """Compare the rounds' pairs, without and with the variant."""

    def middle(side: int) -> Shown:
        return Shown(
            statistics.median(pair[side].rate for pair in pairs),
            statistics.median(pair[side].cpu_us for pair in pairs),
        )

    return Comparison(
        middle(0),
        middle(1),
        statistics.median(given.rate / without.rate for without, given in pairs),
        statistics.median(given.cpu_us / without.cpu_us for without, given in pairs),
    )


def line(name: str, callers: int, found: Comparison) -> str:
    """Return the line of the table."""
    return (
        f"{name:28s} {callers:3d} in flight: {found.without.rate:7.0f} → {found.given.rate:7.0f} calls/s "
        f"({found.rate_ratio:5.3f})   {found.without.cpu_us:6.1f} → {found.given.cpu_us:6.1f} us CPU a call "
        f"({found.cpu_ratio:5.3f})"
    )


def compare(
    bench: Bench, server: str, variant: Variant, rounds: int, seconds: float
) -> Iterator[tuple[int, Comparison]]:
    """Return the comparison for each number of callers."""

    def shown(serving: Running, callers: int, headers: Headers, scraped: int | None) -> Shown:
        cell = Cell(TINY, UNARY, callers, seconds, 0.2)
        load = replace(bench.load_of(servers()[server], TINY, serving.port, cell), headers=headers)
        with scraping(scraped):
            row = bench.measured(serving, load)
        if row["errors"]:
            raise SystemExit(f"{row['errors']} errors; the last: {row['last_message']}")
        return Shown(row["rate"], row["cpu_us_per_answer"])

    with bench.started(servers()[server], TINY) as (bare, _):
        port = bench.spare_port
        flags = [flag.replace(_METRICS_PORT, str(port)) for flag in variant.flags]
        with bench.started(servers()[server], TINY, *flags, headers=variant.headers) as (given, _):
            scraped = port if variant.scraped else None
            for callers in _CALLERS:
                pairs = []
                for number in range(rounds):
                    # The order alternates, so that a drift of the machine affects both alike.
                    if number % 2:
                        second = shown(given, callers, variant.headers, scraped)
                        pairs.append((shown(bare, callers, (), None), second))
                    else:
                        first = shown(bare, callers, (), None)
                        pairs.append((first, shown(given, callers, variant.headers, scraped)))
                yield callers, compared(pairs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=Path, required=True, help="the load generator, built by make")
    parser.add_argument("--quick", action="store_true", help="a minute, for whether it works")
    parser.add_argument("--transport", choices=("lane", "threaded"), default="lane")
    parser.add_argument("--only", metavar="NAME", help="of the variants, those whose names begin like this")
    arguments = parser.parse_args()
    cache, cores = cache_folder(), Cores.split()
    write_models(cache)
    os.sched_setaffinity(0, {cores.load})
    bench = Bench(cache, arguments.load.resolve(), cores)
    rounds, seconds = (3, 0.5) if arguments.quick else (12, 1.5)
    server = LANE if arguments.transport == "lane" else THREADED
    print(f"{server}, {TINY.meaning}, {rounds} rounds of {seconds:g} s:", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for variant in variants(Path(folder)):
            if variant.name.startswith(arguments.only or ""):
                for callers, found in compare(bench, server, variant, rounds, seconds):
                    print(line(variant.name, callers, found), flush=True)


if __name__ == "__main__":
    main()
