"""The comparison of `tensorferry bench` with the load generator in C: its figures, and one run of ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from load_test_agreement import Run, medians, python_run, table
from real_server import build_mlp, examples, serving


def test_medians_are_of_each_figure() -> None:
    runs = [Run((1, 30, 5)), Run((3, 10, 6)), Run((2, 20, 7))]
    assert medians(runs) == (2, 20, 6)


def test_the_table_has_the_differences() -> None:
    lines = table("m", {8: ([Run((1000, 4, 8))], [Run((1050, 4, 6))])})
    assert lines[2:] == [
        "| m | 8 | requests/s | 1,000 | 1,050 | +5.0% |",
        "| m | 8 | p50 ms | 4.00 | 4.00 | +0.0% |",
        "| m | 8 | p99 ms | 8.00 | 6.00 | -25.0% |",
    ]


def test_a_run_against_a_real_server(tmp_path: Path) -> None:
    build_mlp(tmp_path / "mlp.onnx", 2, 16)
    np.save(tmp_path / "row.npy", examples(1))
    with serving(tmp_path / "mlp.onnx", None) as server:
        run = python_run(tmp_path, server.address, tmp_path / "row.npy", 2, 0.3, None)
    rate, p50, p99 = run.figures
    assert rate > 0
    assert 0 < p50 <= p99
