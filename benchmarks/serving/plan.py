"""Plan of the measurements: servers, models, patterns and loads, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from serving.servers import (
    ECHO,
    ECHO_ASYNCIO,
    ECHO_STREAMS,
    HTTP,
    LANE,
    MAX_BATCH_SIZE,
    MOSEC,
    OURS,
    SLOW_PEERS,
    THREADED,
    TRITON,
    TRITON_WINDOW,
)
from serving.workloads import MLP, NULL, SIZES, TINY, TRANSFORMER, Workload

UNARY, ONE_STREAM, STREAMS, OPEN = "unary", "one stream", "streams", "open"
RAW = "raw ONNX Runtime"
SHARES = (0.2, 0.5, 0.8)
RAW_ROWS = (1, 8, 32)
SIZES_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of a server: seconds of warm-up and of measuring.

    `share` is the part of the server's capacity that an open loop offers. `explain` adds a short
    second load, whose answers report the mean batch. With `ceiling` raw ONNX Runtime is measured
    next, in the same batches: on a machine whose speed drifts only figures measured side by side
    compare.
    """

    workload: Workload
    pattern: str
    in_flight: int
    seconds: float
    warm_up: float
    share: float = 0.0
    explain: bool = False
    ceiling: bool = False


@dataclass(frozen=True, slots=True)
class Visit:
    """One server with one model: started, checked, measured and stopped."""

    server: str
    model: str
    cells: Sequence[Cell]


# Seconds of warm-up and of measuring. A batch of the transformer takes about 0.15 s.
_TIMES = {TINY.name: (0.5, 1.5), NULL.name: (0.5, 1.5), MLP.name: (0.6, 1.8), TRANSFORMER.name: (1.0, 4.0)}
_OPEN_SECONDS = {TINY.name: 2.5, MLP.name: 3.0, TRANSFORMER.name: 6.0}


def _closed(workload: Workload, pattern: str, *in_flight: int) -> list[Cell]:
    warm_up, seconds = _TIMES[workload.name]
    explained = workload is not NULL
    return [
        Cell(
            workload,
            pattern,
            callers,
            seconds,
            warm_up,
            explain=explained and pattern == UNARY and callers > 1,
        )
        for callers in in_flight
    ]


def _open(workload: Workload) -> list[Cell]:
    return [Cell(workload, OPEN, 0, _OPEN_SECONDS[workload.name], 0.5, share) for share in SHARES]


def _sizes() -> list[Cell]:
    return [Cell(size, UNARY, SIZES_IN_FLIGHT, 1.0, 0.3) for size in SIZES]


def _tiny(peers: Sequence[str]) -> Iterator[Visit]:
    both = [*_closed(TINY, ONE_STREAM, 32, 128), *_closed(TINY, STREAMS, 32, 128)]
    unary = _closed(TINY, UNARY, 1, 8, 32, 128, 256)
    yield Visit(LANE, TINY.model, [*unary, *both, *_open(TINY)])
    yield Visit(ECHO, TINY.model, [*unary, *_closed(TINY, ONE_STREAM, 32, 128)])
    yield Visit(ECHO_STREAMS, TINY.model, _closed(TINY, STREAMS, 32, 128))
    yield Visit(TRITON, TINY.model, [*unary, *both, *_open(TINY)])
    yield Visit(MOSEC, TINY.model, unary)
    yield Visit(HTTP, TINY.model, unary)
    yield Visit(THREADED, TINY.model, [*unary, *both, *_open(TINY)])
    yield Visit(ECHO_ASYNCIO, TINY.model, [*unary, *both])
    for peer in (TRITON_WINDOW, *peers):
        yield Visit(peer, TINY.model, _closed(TINY, UNARY, 1, 32, 128))


def _identity() -> Iterator[Visit]:
    null = [
        *_closed(NULL, UNARY, 1, 32, 128),
        *_closed(NULL, ONE_STREAM, 32),
        *_closed(NULL, STREAMS, 32),
    ]
    for name in OURS:
        yield Visit(name, NULL.model, [*null, *_sizes()])
    for name in (HTTP, ECHO, TRITON):
        yield Visit(name, NULL.model, _sizes())


def _computing(workload: Workload, in_flight: Sequence[int], peers: Sequence[str]) -> Iterator[Visit]:
    unary = _closed(workload, UNARY, *in_flight)
    streams = [*_closed(workload, ONE_STREAM, 32), *_closed(workload, STREAMS, 32)]
    yield Visit(LANE, workload.model, [*_beside_raw(unary), *streams, *_open(workload)])
    yield Visit(MOSEC, workload.model, unary)
    yield Visit(TRITON, workload.model, [*unary, *(_open(workload) if workload is MLP else [])])
    yield Visit(THREADED, workload.model, [*unary, *streams])
    if workload is MLP:
        yield Visit(TRITON_WINDOW, workload.model, unary)
    for peer in peers:
        yield Visit(peer, workload.model, _closed(workload, UNARY, 32))


def _beside_raw(cells: Sequence[Cell]) -> list[Cell]:
    return [replace(cell, ceiling=cell.in_flight == MAX_BATCH_SIZE) for cell in cells]


def full_round(number: int) -> list[Visit]:
    """Return one round; the order of every other round is reversed, against a slow drift.

    Peers that are far slower are measured with the larger models in the first round only.
    """
    slow = SLOW_PEERS if number == 0 else ()
    groups = [
        list(_tiny(SLOW_PEERS)),
        list(_identity()),
        list(_computing(MLP, (1, 32, 128), slow)),
        list(_computing(TRANSFORMER, (1, 32), slow)),
    ]
    if number % 2:
        groups = [group[::-1] for group in groups]
    return [visit for group in groups for visit in group]


def quick_round(number: int) -> list[Visit]:
    """Return a round of a minute and a half: this server, bare gRPC and raw ONNX Runtime."""
    both = [*_closed(TINY, ONE_STREAM, 32), *_closed(TINY, STREAMS, 32)]
    unary = _closed(TINY, UNARY, 1, 32, 128)
    visits = [
        Visit(LANE, TINY.model, [*unary, *both]),
        Visit(HTTP, TINY.model, unary),
        Visit(ECHO, TINY.model, [*unary, *_closed(TINY, ONE_STREAM, 32)]),
        Visit(ECHO_STREAMS, TINY.model, _closed(TINY, STREAMS, 32)),
        Visit(THREADED, TINY.model, [*unary, *both]),
        Visit(ECHO_ASYNCIO, TINY.model, _closed(TINY, UNARY, 32)),
    ]
    for workload in (MLP, TRANSFORMER):
        half = next(cell for cell in _open(workload) if cell.share == 0.5)
        visits.append(Visit(LANE, workload.model, [*_beside_raw(_closed(workload, UNARY, 32)), half]))
    return [_shortened(visit) for visit in visits]


def _shortened(visit: Visit) -> Visit:
    cells = [replace(cell, seconds=cell.seconds * 0.6, warm_up=cell.warm_up * 0.6) for cell in visit.cells]
    return Visit(visit.server, visit.model, cells)
