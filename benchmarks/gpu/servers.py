"""Compared servers, which differ in one respect each."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_server import PROGRAM, ServerError, started

from gpu.workloads import Workload
from serving.load import UNARY_PATH

_EAGER = str(Path(__file__).with_name("eager_server.py"))
# For some seconds the open loop offers more than capacity; nothing is refused.
_LIMITS = ("--max-queue-size", "1000000", "--max-queue-bytes", "16GiB")
# A server that is not ready by then hangs; CUDA's libraries, the batching check and the warm-up
# take far less.
_START_SECONDS = 240
_ANSWER_SECONDS = 120
# FP16, and other kernels for other batch sizes, relative to the output's magnitude.
_TOLERANCES = {True: 2e-2, False: 1e-3}


@dataclass(frozen=True, slots=True)
class Variant:
    """A server: program, flags beside the common ones, and its measurements.

    `searched` variants also get open-loop load. `for_gpu` variants are no different on
    the CPU. `unbounded` variants form batches of the fastest size, without regard to latency.
    """

    name: str
    meaning: str
    flags: tuple[str, ...] = ()
    program: tuple[str, ...] = PROGRAM
    searched: bool = False
    for_gpu: bool = False
    unbounded: bool = False


DEFAULT = Variant("default", "default options: closed just in time", searched=True)
EAGER = Variant(
    "eager",
    "closed as soon as a worker is free: greedy, two in flight",
    program=(_EAGER,),
    searched=True,
)
THROUGHPUT = Variant("throughput", "default, with the batches that are fastest", unbounded=True)
# To measure another server, add a line.
VARIANTS = (
    DEFAULT,
    EAGER,
    THROUGHPUT,
    Variant("CUDA graphs", "default, with CUDA graphs", flags=("--cuda-graphs",), for_gpu=True),
)


def why_not(variant: Variant, device: str, *, same_size: bool) -> str:
    """Return why a variant is not measured here, empty if it is. `same_size`: the bounded batches are
    the fastest.
    """
    if variant.unbounded and same_size:
        return "the others' batches are the fastest already"
    return "it differs on a GPU only" if variant.for_gpu and device == "cpu" else ""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    variant: Variant
    process: subprocess.Popen[bytes]
    address: str
    words: str
    log: Path

    def warnings(self) -> list[str]:
        """Return its log lines from warnings on."""
        return self.log.read_text(errors="replace").splitlines()


@contextmanager
def serving(
    variant: Variant,
    workload: Workload,
    model: Path,
    device: str,
    most: int,
    cores: Sequence[int],
) -> Iterator[Server]:
    """Run a server on its cores until the block ends; raise ServerError if it does not start or does
    not batch.
    """
    words = (
        f"{workload.name}={model}",
        "--device",
        device,
        "--max-batch-size",
        str(most),
        "--log-level",
        "warning",
    )
    with started(
        cores, *words, *_LIMITS, *variant.flags, program=variant.program, patience=_START_SECONDS
    ) as server:
        batching = server.ready["models"][0]["batching"]
        if f"up to {most} rows" not in batching and most > 1:
            raise ServerError(
                f"{variant.name} does not batch {workload.name}: {batching}; {server.log.read_text(errors='replace')[-1500:]}"
            )
        yield Server(variant, server.process, server.address, batching, server.log)


def warm_up(
    server: Server, workload: Workload, most: int, expected: Mapping[str, Sequence[float]], seconds: float
) -> tuple[float, int]:
    """Make the server run a batch of every size, and compare the first row of each with the bare
    loop's.

    Raises ServerError if they differ. Returns the difference, relative to the output's magnitude,
    and the number of sizes without time. The server itself warms up at powers of two; work of ONNX
    Runtime at the first run of a size (cuDNN tries its algorithms) should not be measured. Large
    sizes come first, because they are usual near saturation.
    """
    import grpc

    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
    with grpc.insecure_channel(server.address, options) as channel:
        infer: Any = channel.unary_unary(UNARY_PATH)
        until, worst = time.monotonic() + seconds, 0.0
        for rows in range(most, 0, -1):
            response = infer(workload.request(rows), timeout=_ANSWER_SECONDS)
            difference = _difference(workload, response, expected)
            if not difference <= _TOLERANCES[workload.model.half]:
                raise ServerError(
                    f"{server.variant.name} answers a row of {workload.name} among {rows} with something else than "
                    f"ONNX Runtime does: it differs by {difference:.2e} of the output's magnitude"
                )
            worst = max(worst, difference)
            if time.monotonic() > until:
                return worst, rows - 1
    return worst, 0


def _difference(workload: Workload, response: bytes, expected: Mapping[str, Sequence[float]]) -> float:
    worst = 0.0
    outputs = workload.answer(response)
    for name, values in expected.items():
        got = outputs[name][0]
        if len(got) != len(values):
            return math.inf
        magnitude = max(map(abs, values))
        worst = max(worst, max(abs(a - b) for a, b in zip(got.tolist(), values, strict=True)) / magnitude)
    return worst
