"""Cost of each step between a batch's requests and its answers on a device, and the gain of each of
ours.

    python benchmarks/gpu/steps.py bert --device cuda:0 --rows 1,8,32
    python benchmarks/gpu/steps.py model.onnx --device cpu

`bert` and `resnet` are the models of `make gpu-bench`, in FP16 on a GPU.

For each number of rows, requests of one row each are joined and run in four ways:

- plain: ONNX Runtime's `run` on numpy arrays, joined in ordinary memory
- bound: the same arrays, bound for each run, outputs bound to the host
- staged: joined in page-locked memory, copied, run on addresses bound once, copied back (`Session.staged`)
- graphs: the same as a captured CUDA graph; only on CUDA, and only for models that can be captured

`one` is the time of a batch from its requests to its answers, in one thread. `two` is the time
between the ends of consecutive batches, with two threads that take turns like the batcher's
workers, so that copies overlap. The ways are interleaved, and the figure is the median of the
rounds. Requests are random and in memory before the start.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# A script's own folder is first on the path. Its modules are imported as gpu.NAME, and test support
# from tests/.
if __name__ == "__main__":
    sys.path[:1] = [
        str(Path(__file__).resolve().parents[1]),
        str(Path(__file__).resolve().parents[2] / "tests"),
    ]

from gpu.needs import use_this_checkout

if __name__ == "__main__":
    use_this_checkout()

from support.server.cpu_as_device import CpuDeviceMemory

from gpu.workloads import ON_GPU, workload_of
from serving.run import cache_folder
from tensorferry.batcher import Outcome, Request
from tensorferry.batcher.execution.collate import join, request_of
from tensorferry.server.errors import StartError
from tensorferry.server.gpu.cuda_graphs import GraphOptions
from tensorferry.server.runtime.devices import choose_device
from tensorferry.server.runtime.ort import onnxruntime
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.sampling import random_inputs, working_size
from tensorferry.server.runtime.session import Session

# From requests to answers; the device lock is held only while the device computes.
Way = Callable[[Sequence[Request], threading.Lock], object]


def _ignore(outcome: Outcome) -> None:
    """Ignore the outcome."""


def plain(session: Session) -> Way:
    """Run like `Session` on the CPU."""
    names = [spec.name for spec in session.signature.outputs]
    options = onnxruntime.RunOptions()

    def run(requests: Sequence[Request], turn: threading.Lock) -> object:
        joined = join(requests)
        with turn:
            return session._session.run(names, joined, options)

    return run


def bound(session: Session) -> Way:
    """Run like `Session` on CUDA without page-locked memory."""

    def run(requests: Sequence[Request], turn: threading.Lock) -> object:
        joined = join(requests)
        with turn:
            return session._run_in_callers_memory(joined)

    return run


def staged(session: Session) -> Way:
    """Run like the batcher with a staged session."""
    steps = session.staged
    assert steps is not None

    def run(requests: Sequence[Request], turn: threading.Lock) -> object:
        batch = steps.load(join(requests, steps.place))
        with turn:
            outputs = steps(batch)
        return steps.fetch(outputs)

    return run


def ways(
    path: Path, device: str, rows: Sequence[int], size: int | None
) -> tuple[dict[str, Way], list[Request], str]:
    """Return the ways that device and model support, requests for the largest batch, and what is
    missing and why.
    """
    memory = CpuDeviceMemory() if device == "cpu" else None
    session = Session(path, device, memory=memory)
    if "BYTES" in {spec.datatype.name for spec in session.signature.inputs + session.signature.outputs}:
        raise StartError(f"{path} has strings, which are never copied to a device: choose another model")
    size = size or working_size(session.signature, session.run)[0]
    if size is None:
        raise StartError(
            f"{path} does not run on random input; give a --size that its varying dimensions can have"
        )
    inputs = random_inputs(session.signature, max(rows), size)
    requests = [
        request_of({name: array[row : row + 1] for name, array in inputs.items()}, _ignore, one_row=False)
        for row in range(max(rows))
    ]
    found: dict[str, Way] = {"bound": bound(session)}
    if "BF16" not in {spec.datatype.name for spec in session.signature.inputs + session.signature.outputs}:
        found = {"plain": plain(session), **found}
    if session.staged is None:
        return found, requests, "no page-locked memory: the log says why"
    found["staged"] = staged(session)
    if device == "cpu":
        return found, requests, "graphs: nothing to capture on the CPU"
    captured = Session(path, device, OrtOptions(graphs=GraphOptions()))
    batch_shapes = [{name: (count, *array.shape[1:]) for name, array in inputs.items()} for count in rows]
    if not captured.capture(batch_shapes, pads=False):
        return found, requests, "graphs: the model cannot be captured; the log says why"
    found["graphs"] = staged(captured)
    return found, requests, ""


def one(way: Way, requests: Sequence[Request], runs: int) -> float:
    """Return the seconds of a batch, in one thread."""
    turn = threading.Lock()
    started = time.perf_counter()
    for _ in range(runs):
        way(requests, turn)
    return (time.perf_counter() - started) / runs


def two(way: Way, requests: Sequence[Request], runs: int) -> float:
    """Return the seconds from a batch to the next, with two threads that take turns."""
    turn, together = threading.Lock(), threading.Barrier(3)

    def work() -> None:
        together.wait()
        for _ in range((runs + 1) // 2):
            way(requests, turn)

    threads = [threading.Thread(target=work, name=f"worker-{index}") for index in range(2)]
    for thread in threads:
        thread.start()
    together.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - started) / ((runs + 1) // 2 * 2)


def measure(
    found: Mapping[str, Way], requests: Sequence[Request], runs: int, rounds: int
) -> dict[tuple[str, str], float]:
    """Return the median seconds of each way, by `one` and by `two`."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for name, way in found.items():
        one(way, requests, 3)  # The first runs of a shape are slow.
        seconds[name, "one"], seconds[name, "two"] = [], []
    for _ in range(rounds):
        for name, way in found.items():
            seconds[name, "one"].append(one(way, requests, runs))
            seconds[name, "two"].append(two(way, requests, runs))
    return {key: statistics.median(values) for key, values in seconds.items()}


def _file(name: str, device: str) -> Path:
    """Return the model's file, built if it is one of the benchmark's."""
    return workload_of(name, small=device == "cpu").write(cache_folder()) if name in ON_GPU else Path(name)


def main(argv: Sequence[str]) -> int:
    """Print a table; return 2 if the device or the model cannot be used."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a file, bert or resnet")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--rows", default="1,8,32", help="sizes of batch")
    parser.add_argument("--size", type=int, help="of the dimensions that vary besides the batch axis")
    parser.add_argument("--runs", type=int, default=50, help="batches of a round")
    parser.add_argument("--rounds", type=int, default=9)
    options: Any = parser.parse_args(argv)
    rows = [int(text) for text in options.rows.split(",")]
    try:
        device = choose_device(options.device)
        found, requests, missing = ways(_file(options.model, device), device, rows, options.size)
    except StartError as error:
        print(f"steps: {error}", file=sys.stderr)
        return 2
    print(
        f"{options.model} on {device}; milliseconds, medians of {options.rounds} rounds of {options.runs} batches"
    )
    if missing:
        print(f"not measured: {missing}")
    print(f"{'rows':>6} {'way':8} {'one':>9} {'two':>9}")
    for count in rows:
        result = measure(found, requests[:count], options.runs, options.rounds)
        for name in found:
            print(f"{count:6} {name:8} {result[name, 'one'] * 1e3:9.3f} {result[name, 'two'] * 1e3:9.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
