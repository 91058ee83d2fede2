"""What an empty Python step between two tiny models costs, here and in Triton.

Every server has the two models alone, and with one or two steps between them. The load alternates between them, so the differences
are those of one server within a second or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from onnx import helper

from python_models.calls import Call, app_command, measured, started
from serving.load import shape_of
from serving.measure import Bench
from serving.peers.settings import Engine
from serving.processes import Running
from serving.servers import MAX_BATCH_SIZE, TRITON, TRITON_WINDOW
from serving.weights import Weights
from serving.workloads import build_dense

Row = Mapping[str, Any]

PART, OURS = "steps", "tensorferry"
WITHOUT, STEP, TWO, BLS = "without", "step", "two", "bls"
_WIDTH = 64
_SECONDS, _WARM_UP = 0.5, 0.15
# The difference is smallest for tensorferry, so it needs more pairs against the noise.
_PAIRS = {OURS: 12, TRITON: 5, TRITON_WINDOW: 5}
SERVERS = tuple(_PAIRS)
PEERS = SERVERS[1:]


def write_models(folder: Path) -> None:
    """Write the two models."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("first", "second")):
        graph = build_dense((_WIDTH, _WIDTH), Weights(seed))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.save(model, str(folder / f"{name}.onnx"))


def calls(folder: Path, model: str) -> tuple[Call, Call]:
    """Return a call of a whole batch, and one of a row."""
    rows = np.random.default_rng(2).standard_normal((MAX_BATCH_SIZE, _WIDTH), np.float32)
    answers = Engine(folder / "second.onnx").run(Engine(folder / "first.onnx").run(rows))
    return Call(model, {"x": rows}, answers), Call(model, {"x": rows[:1]}, answers[:1])


def measure(bench: Bench, number: int, shortened: float, server: str) -> Iterator[Row]:
    """Yield for each pair and model the latency of a batch, and the processor time of a request."""
    folder = bench.cache / "models" / "steps"
    write_models(folder)
    models, rows = models_of(server), list[Row]()
    with _started(bench, server, folder) as serving:
        for pair in range(max(2, round(_PAIRS[server] * shortened))):
            for model in models[::-1] if pair % 2 else models:
                figures = _figures(bench, serving, calls(folder, model), shortened)
                told = {"part": PART, "round": number, "server": server, "model": model, "pair": pair}
                rows.append({**told, **figures})
                yield rows[-1]
    costs = (
        f"{model} + {differences(rows, server, model, 'batch_us')[number]:.1f} µs a batch, "
        f"+ {differences(rows, server, model, 'request_us')[number]:.2f} µs a request"
        for model in models[1:]
    )
    print(f"{server:20s} {'; '.join(costs)}", flush=True)


def models_of(server: str) -> list[str]:
    """Return the models that a server has."""
    return [WITHOUT, STEP, TWO] if server == OURS else [WITHOUT, STEP, TWO, BLS]


def differences(rows: Sequence[Row], server: str, model: str, field: str) -> dict[int, float]:
    """Return by round how much more a figure is for this model than without the step: the median of the pairs."""
    of = {
        (row["round"], row["pair"], row["model"]): float(row[field])
        for row in rows
        if row["part"] == PART and row["server"] == server
    }
    found: dict[int, list[float]] = {}
    for (number, pair, name), value in of.items():
        if name == model and (number, pair, WITHOUT) in of:
            found.setdefault(number, []).append(value - of[number, pair, WITHOUT])
    return {number: median(values) for number, values in sorted(found.items())}


def _started(bench: Bench, server: str, folder: Path) -> AbstractContextManager[Running]:
    variables = {
        "SERVING_BENCH_MODEL": str(folder),
        "SERVING_BENCH_WINDOW_MS": "2" if server == TRITON_WINDOW else "0",
    }
    right = [call for model in models_of(server) for call in calls(folder, model)]
    if server == OURS:
        return started(bench, app_command("steps"), "", variables, right)
    return started(bench, ["-m", "python_models.peers.triton_steps"], "triton", variables, right)


def _figures(bench: Bench, serving: Running, both: Sequence[Call], shortened: float) -> Row:
    batch, request = (
        measured(bench, serving, [call], shape_of("unary", in_flight, False), _SECONDS * shortened, _WARM_UP)
        for call, in_flight in zip(both, (1, MAX_BATCH_SIZE), strict=True)
    )
    return {
        "batch_us": 1e3 * batch["p50_ms"],
        "request_us": request["cpu_us_per_answer"],
        "mean_rows": request["mean_rows"],
        "other_cores": max(batch["other_cores"], request["other_cores"]),
    }
