"""The bare loop: ONNX Runtime with IO binding, run after run; the ceiling of a server.

    python -m gpu.loop MODEL --workload bert [--small] --device cuda:0

A separate process, like the server. Each line of input is an order in JSON, answered with a line of
JSON: {"rows": 8, "seconds": 0.5, "copies": false} for the time of batches, {"sample": 3} for the
model's output for one row alone. Without copies inputs and outputs stay on the device; with them a
batch is copied there from the host before each run, and its outputs back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpu.cores import end, on_cores
from gpu.workloads import Workload, workload_of

_WARM_UP_RUNS = 3
_STOP_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Timed:
    """Rate of batches of `rows` rows, run after run: rows per second, and seconds per batch."""

    rows: int
    copies: bool
    rate: float
    batch_seconds: float


class LoopError(Exception):
    """The bare loop's process ended, with the end of its output."""


class Loop:
    """Client of the bare loop's process. Not thread-safe."""

    def __init__(self, path: Path, workload: Workload, device: str, cores: Sequence[int], log: Path) -> None:
        self._log = log
        words = ["-m", "gpu.loop", str(path), "--workload", workload.name, "--device", device]
        if not workload.model.half:
            words.append("--small")
        with log.open("wb") as said, on_cores(cores):
            self._process = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        end(self._process, _STOP_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def timed(self, rows: int, seconds: float, *, copies: bool) -> Timed:
        """Run batches of `rows` rows for `seconds`."""
        answer = self._ask({"rows": rows, "seconds": seconds, "copies": copies})
        each = answer["elapsed"] / answer["runs"]
        return Timed(rows, copies, rows / each, each)

    def outputs(self, sample: int) -> Mapping[str, list[float]]:
        """Return the model's output for one row."""
        answer: Mapping[str, list[float]] = self._ask({"sample": sample})
        return answer

    def _ask(self, order: Mapping[str, object]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = b""
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            raise LoopError(f"the bare loop ended: {self._log.read_text(errors='replace')[-1500:]}")
        return json.loads(line)


def best_rate(times: Sequence[Timed]) -> float:
    """Return the most rows per second, at any size, with or without copies: the offline ceiling."""
    return max(timed.rate for timed in times)


def fastest_size(times: Sequence[Timed]) -> int:
    """Return the batch size with the most rows per second."""
    return max(times, key=lambda timed: timed.rate).rows


def chosen_size(times: Sequence[Timed], bound: float, share: float = 0.85, part: float = 0.4) -> int:
    """Return the largest batch that a server with a latency bound should form.

    A request may wait for one batch and run in the next, so a batch may take at most a `part` of
    the bound. Of these sizes the largest counts that reaches this share of their best rate, because
    the server has work with each batch, too. If every batch takes longer, it is the smallest size.
    """
    slow = {timed.rows for timed in times if timed.batch_seconds > part * bound}
    fitting = [timed for timed in times if timed.rows not in slow]
    if not fitting:
        return min(timed.rows for timed in times)
    best = best_rate(fitting)
    return max(timed.rows for timed in fitting if timed.rate >= share * best)


class _Bound:
    """A session whose inputs and outputs are bound again for each size."""

    def __init__(self, path: str, workload: Workload, device: str) -> None:
        from tensorferry.server.runtime.devices import preload_libraries
        from tensorferry.server.runtime.ort import onnxruntime

        self._workload = workload
        self._ort = onnxruntime
        self._place, _, number = device.partition(":")
        self._number = int(number or 0)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))
        options.log_severity_level = 3
        providers: list[Any] = ["CPUExecutionProvider"]
        if self._place == "cuda":
            preload_libraries()
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": self._number}))
        # A fallback would be reported on stdout, where the answers are written.
        self._session = onnxruntime.InferenceSession(path, options, providers=providers, enable_fallback=0)
        wanted = "CUDAExecutionProvider" if self._place == "cuda" else "CPUExecutionProvider"
        if self._session.get_providers()[0] != wanted:
            raise SystemExit(f"ONNX Runtime could not use {device}; it uses {self._session.get_providers()}")

    def outputs(self, sample: int) -> dict[str, list[float]]:
        rows = dict(self._workload.rows(1, sample))
        names = list(self._workload.outputs)
        got = self._session.run(names, rows)
        return {name: array.astype("float32")[0].tolist() for name, array in zip(names, got, strict=True)}

    def run(self, rows: int, seconds: float, *, copies: bool) -> tuple[int, float]:
        """Run for `seconds`; return the number of runs, and their time."""
        arrays = self._workload.rows(rows)
        binding = self._session.io_binding()
        inputs = {}
        for name, array in arrays.items():
            inputs[name] = self._ort.OrtValue.ortvalue_from_numpy(array, self._place, self._number)
            binding.bind_ortvalue_input(name, inputs[name])
        for name, like in self._outputs_of(arrays).items():
            if copies:
                binding.bind_output(name, "cpu")
            else:
                value = self._ort.OrtValue.ortvalue_from_numpy(like, self._place, self._number)
                binding.bind_ortvalue_output(name, value)
        run = self._session.run_with_iobinding

        def once() -> None:
            if copies:
                for name, array in arrays.items():
                    inputs[name].update_inplace(array)
            run(binding)

        for _ in range(_WARM_UP_RUNS):
            once()
        count, begun, elapsed = 0, time.perf_counter(), 0.0
        while elapsed < seconds or not count:
            once()
            count += 1
            elapsed = time.perf_counter() - begun
        return count, elapsed

    def _outputs_of(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        names = list(self._workload.outputs)
        return dict(zip(names, self._session.run(names, dict(arrays)), strict=True))


def main() -> None:
    """Execute orders until there are no more."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    bound = _Bound(arguments.model, workload_of(arguments.workload, small=arguments.small), arguments.device)
    for line in sys.stdin:
        order = json.loads(line)
        answer: object
        if "sample" in order:
            answer = bound.outputs(order["sample"])
        else:
            runs, elapsed = bound.run(order["rows"], order["seconds"], copies=order["copies"])
            answer = {"runs": runs, "elapsed": elapsed}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
