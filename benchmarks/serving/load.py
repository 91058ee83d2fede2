"""The load generator's command line, and its output as a record."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNARY_PATH = "/inference.GRPCInferenceService/ModelInfer"
STREAM_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
_MOST_CONNECTIONS = 4
_MARGIN_SECONDS = 60


class LoadError(Exception):
    """Failure of the load generator, with its reason."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Distribution of the requests in flight: `in_flight` messages on each of `streams` on each
    connection.
    """

    mode: str
    connections: int
    streams: int
    in_flight: int


def shape_of(pattern: str, in_flight: int, http: bool) -> Shape:
    """Return the shape of a pattern: unary, "one stream", "streams" (one message in flight on each),
    or open.
    """
    if http:
        # HTTP/1.1 has one request in flight on a connection.
        return Shape("http1", in_flight, 1, 1)
    if pattern == "one stream":
        return Shape("stream", 1, 1, in_flight)
    if pattern == "open":
        return Shape("unary", _MOST_CONNECTIONS, 1, 1)
    connections = min(in_flight, _MOST_CONNECTIONS)
    return Shape("stream" if pattern == "streams" else "unary", connections, in_flight // connections, 1)


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement: target, requests, shape and duration."""

    port: int
    path: str
    body: Path
    shape: Shape
    seconds: float
    warm_up: float
    least_bytes: int
    id_offset: int = -1
    content_type: str = "application/grpc"
    rate: float = 0.0
    seed: int = 1
    calls: int = 0
    count_batches: bool = False
    headers: Sequence[tuple[str, str]] = ()

    def words(self) -> Sequence[str]:
        """Return the arguments of the command line."""
        values: Mapping[str, object] = {
            "mode": self.shape.mode, "port": self.port, "path": self.path, "body": self.body,
            "content-type": self.content_type, "connections": self.shape.connections,
            "streams": self.shape.streams, "in-flight": self.shape.in_flight, "warm-up": self.warm_up,
            "seconds": self.seconds, "calls": self.calls, "least-bytes": self.least_bytes,
            "id-offset": self.id_offset, "rate": self.rate, "seed": self.seed,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in values.items()]
        words += [f"--header={name}={value}" for name, value in self.headers]
        return [*words, "--count-batches"] if self.count_batches else words


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a measurement: rates per second, latencies in milliseconds."""

    answers: int
    errors: int
    unanswered: int
    seconds: float
    rate: float
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    lag_p99_ms: float
    mean_rows: float
    mean_bytes: float
    cpu_seconds: float
    last_message: str


def parse(line: str) -> Measured:
    """Parse the line of JSON; raise LoadError if it is malformed, or if no request was answered."""
    try:
        fields: dict[str, Any] = json.loads(line)
        measured = Measured(**fields)
    except (ValueError, TypeError) as error:
        raise LoadError(f"not the load generator's line: {line!r}") from error
    if measured.answers == 0:
        raise LoadError(f"no answer, {measured.errors} errors; last message: {measured.last_message}")
    return measured


def run_load(
    program: Path, load: Load, began: Callable[[], None] = lambda: None, *, core: int | None = None
) -> Measured:
    """Run the load generator, and call `began` after its warm-up. Raises LoadError."""
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    process = subprocess.Popen(
        [*pinned, str(program), *load.words()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() == "measuring":
            began()
        # A closed loop ends by its clock, an open loop at most its grace period later.
        line, said = process.communicate(timeout=load.seconds + _MARGIN_SECONDS)
    except subprocess.TimeoutExpired:
        raise LoadError(f"it did not end within {load.seconds + _MARGIN_SECONDS:.0f} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise LoadError(said.strip() or f"exit status {process.returncode}")
    return parse(line)
