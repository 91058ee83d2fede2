"""`make gpu-check`: CUDA against the CPU, with and without CUDA graphs; a failing GPU; end-to-end
tests on CUDA.

    python tests/gpu_check.py [--only models|failures|tests] [--seconds 540] [TESTS ...]

Without a GPU it says that it checked nothing, and exits with 0. If a command may run for some
minutes only, run each part by itself, and TESTS (as pytest takes them) in portions. If the project
is not installed, the checkout of this file is used.

Echo models of each datatype must equal the CPU bit by bit. Models that compute may differ by
`TOLERANCE`, relative to the largest magnitude of an output: other kernels sum in another order, and
CUDA uses TF32 for FP32 matrix products on some GPUs. Each model runs alone at several sizes, and in
a batcher with two batches in flight, under load from many threads. States of sequences are handed on
in device memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks")]

from checkout import use_this_checkout  # noqa: E402 (the folders are put on the path above)

if __name__ == "__main__":
    use_this_checkout()

import gpu_failures  # noqa: E402
from support.models import small  # noqa: E402
from support.processes import models as e2e_models  # noqa: E402

from tensorferry.batcher import Batcher, Outcome, SequenceTag, StatefulBatcher, StateTensor  # noqa: E402
from tensorferry.batcher.execution.collate import request_of  # noqa: E402
from tensorferry.protos.tensors import DATATYPES  # noqa: E402
from tensorferry.server.errors import StartError  # noqa: E402
from tensorferry.server.runtime.checks.sampling import random_inputs  # noqa: E402
from tensorferry.server.runtime.devices import choose_device  # noqa: E402
from tensorferry.server.runtime.gpu.cuda_graphs import GraphOptions  # noqa: E402
from tensorferry.server.runtime.gpu.pinned_memory import DeviceMemory  # noqa: E402
from tensorferry.server.runtime.ort_options import OrtOptions  # noqa: E402
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth  # noqa: E402
from tensorferry.server.runtime.recovery.recovering_instance import (  # noqa: E402
    RecoveringInstance,
    RecoveringStagedModel,
)
from tensorferry.server.runtime.session import Session  # noqa: E402

Array = npt.NDArray[Any]

# Largest difference from the CPU, relative to the output's largest magnitude, by the datatype of
# the computation.
TOLERANCE = {"exact": 0.0, "FP16": 1e-2, "FP32": 1e-3, "FP64": 1e-9}

PARTS = ("models", "failures", "tests")
TESTS = ("tests/e2e", "tests/wire", "tests/client/memory/test_cuda_shared_memory.py")
# Seconds after which pytest is interrupted, so that it reports its results so far.
_END_SECONDS = 30.0

ROWS = (1, 2, 3, 7, 8, 32, 33)
RUNGS = (1, 4, 32)
THREADS, REQUESTS = 16, 40
SEQUENCES, STEPS = 50, 10


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its datatype, and the size of the dynamic axes other than the batch axis.

    `captured` says whether a CUDA graph of it must be possible.
    """

    name: str
    path: Path
    precision: str
    size: int = 16
    captured: bool = True


def cases(folder: Path) -> Iterator[Case]:
    """Return models of every datatype, and of several kinds."""
    for name in DATATYPES:
        path = small.echo(folder / f"echo_{name}.onnx", name)
        # ONNX Runtime may run the only node on the CPU, or remove it.
        yield Case(f"echo of {name}", path, "exact", captured=False)
        if name != "BYTES":
            # Halves are exact, except that integers are truncated, towards 0 everywhere.
            path = small.halved(folder / f"halved_{name}.onnx", name)
            yield Case(f"half of {name}", path, "exact", captured=False)
    for name, dtype in (("FP16", np.float16), ("FP32", np.float32), ("FP64", np.float64)):
        yield Case(f"mlp in {name}", small.mlp(folder / f"mlp_{name}.onnx", dtype), name)
    yield Case("convolution", small.conv(folder / "conv.onnx"), "FP32", captured=False)
    yield Case("attention", small.attention(folder / "attention.onnx"), "FP32", captured=False)
    yield Case("digits", HERE.parent / "examples" / "digits" / "digits.onnx", "FP32", captured=False)
    yield Case("probe", e2e_models.probe(folder / "probe.onnx"), "FP32", captured=False)
    yield Case("mixing", e2e_models.mixing(folder / "mixing.onnx"), "FP32", captured=False)


def difference(expected: Mapping[str, Array], got: Mapping[str, Array]) -> float:
    """Return the largest difference, relative to the magnitude of the output; inf if shape or dtype
    differ.
    """
    worst = 0.0
    for name, array in expected.items():
        other = got[name]
        if (array.shape, array.dtype) != (other.shape, other.dtype):
            return float("inf")
        if array.dtype.kind != "f":
            worst = max(worst, 0.0 if np.array_equal(array, other) else float("inf"))
        elif array.size:
            a, b = array.astype(np.float64), other.astype(np.float64)
            finite = np.isfinite(a)
            if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(b[finite]).all():
                return float("inf")
            if finite.any():
                scale = max(float(np.abs(a[finite]).max()), 1e-6)
                worst = max(worst, float(np.abs(a[finite] - b[finite]).max()) / scale)
    return worst


def alone(case: Case, on_cpu: Session, session: Session) -> float:
    """Compare the session alone at several sizes, up and down, so that memory is reused."""
    worst = 0.0
    for seed, rows in enumerate((*ROWS, *reversed(ROWS))):
        inputs = random_inputs(on_cpu.signature, rows, case.size, seed)
        worst = max(worst, difference(on_cpu.run(inputs), session.run(inputs)))
    return worst


def under_load(case: Case, on_cpu: Session, session: Session) -> float:
    """Send requests of one to three rows from many threads, with two batches in flight."""
    worst = [0.0] * THREADS
    # Rows have the same answers alone and together; else the batching check refused the model.
    with Batcher([session.staged or session.run], 32, pipelined=True) as batcher:

        def send(thread: int) -> None:
            generator = np.random.default_rng(thread)
            kept: list[tuple[Mapping[str, Array], SimpleQueue[Outcome]]] = []
            for index in range(REQUESTS):
                rows = int(generator.integers(1, 4))
                inputs = random_inputs(on_cpu.signature, rows, case.size, thread * REQUESTS + index)
                kept.append((inputs, SimpleQueue()))
                # Not with a future, which copies: views are kept while other batches run, and their
                # memory must not be reused meanwhile.
                batcher.enqueue(request_of(inputs, kept[-1][1].put, one_row=False))
            outcomes = [(inputs, answered.get(timeout=60)) for inputs, answered in kept]
            assert not any(outcome.error for _, outcome in outcomes)
            worst[thread] = max(difference(on_cpu.run(inputs), got.outputs) for inputs, got in outcomes)

        threads = [threading.Thread(target=send, args=(index,)) for index in range(THREADS)]
        worst = [float("inf")] * THREADS
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    return max(worst)


def check(case: Case, device: str, memory: DeviceMemory | None = None) -> list[str]:
    """Return deviations and failures, and print the figures."""
    on_cpu = Session(case.path, "cpu")
    wrong = []
    for graphs in (False, True):
        options = OrtOptions(graphs=GraphOptions()) if graphs else OrtOptions()
        session = Session(case.path, device, options, memory)
        if graphs:
            batch_shapes = [
                {
                    name: array.shape
                    for name, array in random_inputs(on_cpu.signature, rows, case.size).items()
                }
                for rows in RUNGS
            ]
            # If a model mixes rows, the answers depend on the neighbours.
            if not session.capture(batch_shapes, pads=case.name not in MIXING):
                if case.captured:
                    wrong.append(f"{case.name} could not be captured")
                continue
        how = "with CUDA graphs" if graphs else "without CUDA graphs"
        figures = {"alone": alone(case, on_cpu, session)}
        if case.name not in MIXING:
            figures["under load"] = under_load(case, on_cpu, session)
        for when, figure in figures.items():
            print(f"gpu-check: {case.name}, {when}, {how}: differs by {figure:.2e} of the outputs' magnitude")
            if not figure <= TOLERANCE[case.precision]:
                wrong.append(
                    f"{case.name}, {when}, {how}: {figure:.2e}, allowed {TOLERANCE[case.precision]:.0e}"
                )
    return wrong


# The rows of these models depend on each other on purpose.
MIXING = ("mixing",)


def held_states(path: Path, device: str, memory: DeviceMemory | None = None) -> list[str]:
    """Hand on the states of many sequences in device memory; return what is wrong, and print it."""
    wrong = []
    width = 40_000
    initial = np.zeros((1, width), np.float32)
    for graphs in (False, True):
        how = "with CUDA graphs" if graphs else "without CUDA graphs"
        session = Session(path, device, OrtOptions(graphs=GraphOptions() if graphs else None), memory)
        if graphs and not session.capture(
            [{"x": (rows, 1), "past": (rows, width)} for rows in RUNGS], pads=True
        ):
            wrong.append("the model with states could not be captured")
            continue
        instance = RecoveringInstance(
            session, lambda: Session(path, device), InstanceHealth("totals", "1"), 0
        )
        with StatefulBatcher(
            RecoveringStagedModel(instance),
            [StateTensor("past", "next", initial)],
            max_batch_size=32,
            pipelined=True,
        ) as batcher:
            differing = 0
            for step in range(1, STEPS + 1):
                answered: list[SimpleQueue[Outcome]] = [SimpleQueue() for _ in range(SEQUENCES)]
                for number, queue in enumerate(answered, 1):
                    request = request_of({"x": np.full((1, 1), number, np.float32)}, queue.put, one_row=False)
                    request.sequence = SequenceTag(number, start=step == 1)
                    batcher.enqueue(request)
                for number, queue in enumerate(answered, 1):
                    outcome = queue.get(timeout=60)
                    right = outcome.error is None and float(outcome.outputs["y"][0, 0]) == number * step
                    differing += not right
        answers = STEPS * SEQUENCES
        print(
            f"gpu-check: states of {SEQUENCES} sequences, {how}: {differing} of {answers} answers are wrong"
        )
        if differing:
            wrong.append(f"states of sequences, {how}: {differing} of {answers} answers are wrong")
    return wrong


def on_cuda(tests: Sequence[str], seconds: float) -> list[str]:
    """Run tests on CUDA, in several processes if pytest can; return failures."""
    words = [sys.executable, "-m", "pytest", "-q", *tests]
    if find_spec("xdist") is not None:
        words += ["-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
    started = subprocess.Popen(words, cwd=HERE.parent, env={**os.environ, "TENSORFERRY_DEVICE": "cuda"})
    try:
        code = started.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        started.send_signal(signal.SIGINT)
        try:
            started.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        return [f"the tests did not end within {seconds:.0f} s: name some of them, or raise --seconds"]
    return [f"the tests ended with code {code}"] if code else []


def run(parts: Sequence[str], tests: Sequence[str], device: str, seconds: float) -> list[str]:
    """Return the failures of these parts."""
    began, wrong = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        if "models" in parts:
            for case in cases(Path(folder)):
                try:
                    wrong += check(case, device)
                except Exception as error:
                    # The other parts still run.
                    wrong.append(f"{case.name}: {type(error).__name__}: {error}")
            try:
                wrong += held_states(small.totals(Path(folder) / "totals.onnx"), device)
            except Exception as error:
                wrong.append(f"states: {type(error).__name__}: {error}")
        if "failures" in parts:
            try:
                wrong += gpu_failures.check(device, Path(folder))
            except Exception as error:
                wrong.append(f"failures: {type(error).__name__}: {error}")
    if "tests" in parts:
        wrong += on_cuda(tests, seconds - _END_SECONDS - (time.monotonic() - began))
    return wrong


def main(argv: Sequence[str]) -> int:
    """Return 0 if everything agrees or there is no GPU, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="one of the parts")
    parser.add_argument("--seconds", type=float, default=3600.0, help="(default: 3600)")
    parser.add_argument("tests", nargs="*", default=TESTS, help=f"(default: {' '.join(TESTS)})")
    options: Any = parser.parse_args(argv)
    try:
        device = choose_device("cuda")
    except StartError as error:
        print(f"gpu-check: NOTHING WAS CHECKED, not measured on a GPU: {error}")
        return 0
    print(f"gpu-check: on {device}", flush=True)
    wrong = run([options.only] if options.only else PARTS, options.tests, device, options.seconds)
    for line in wrong:
        print(f"gpu-check: WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
