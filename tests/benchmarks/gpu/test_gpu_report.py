"""The report of `make gpu-bench`, from invented results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu.report import SECTION, ceiling, latency_bounded, report, saturation, write

ACCOUNT = {
    "rows": 8.0,
    "busy": 0.9,
    "run": 0.011,
    "before": 0.001,
    "after": 0.002,
    "cpu": 0.0005,
    "cores": 1.5,
    "threads": [0.9, 0.4],
    "inside": 0.01,
}
RUN = {
    "scenario": "Offline",
    "mean": 0.02,
    "p50": 0.02,
    "p99": 0.1,
    "valid": True,
    "errors": 0,
    "busiest": 0.3,
    "loadgen": 0.1,
    "seconds": 8.0,
    "account": ACCOUNT,
}


def part(*, small: bool, throughput: float | None = None) -> dict[str, Any]:
    offline = []
    for number, rate in enumerate((700.0, 760.0, 720.0)):
        offline.append({**RUN, "round": number, "variant": "default", "rate": rate, "target": rate})
        offline.append({**RUN, "round": number, "variant": "eager", "rate": rate - 50, "target": rate})
        if throughput:
            offline.append(
                {**RUN, "round": number, "variant": "throughput", "rate": throughput, "target": rate}
            )
    met = {**RUN, "variant": "default", "confirms": True, "met": True, "rate": 648.0, "target": 650.0}
    missed = {**met, "variant": "eager", "met": False, "p99": 0.2, "errors": 3, "valid": False}
    loop = [
        {"round": number, "rows": rows, "copies": copies, "rate": rate, "batch_seconds": rows / rate}
        for number in (-1, 0, 1, 2)
        for rows, copies, rate in ((1, False, 200.0), (8, False, 800.0), (8, True, 750.0))
    ]
    return {
        "date": "2026-11-21",
        "command": "make gpu-bench",
        "device": "NVIDIA H100" if not small else "CPU",
        "small": small,
        "layout": "4 of the cores for the server, 11 for the load, 1 for LoadGen",
        "machine": {
            "processor": "a processor",
            "cores": 16,
            "python": "3.12.3",
            "versions": {"onnx": "1.23"},
        },
        "workload": "bert",
        "minutes": 7.5,
        "max_batch_size": 8,
        "loop": loop,
        "offline": offline,
        "server": [missed, met],
        "peaks": {"default": met},
        "skipped": {"CUDA graphs": "this server has no --cuda-graphs"},
        "warnings": {"eager": [json.dumps({"message": "/a/b/model.onnx is odd"}), "not JSON"]},
        "predicted": {"just_in_time": 660.0, "eager": 600.0, "offline": 780.0, "wire": 0.001},
    }


def test_a_share_is_of_the_best_that_the_loop_reached_in_the_same_round() -> None:
    results = part(small=False)
    assert ceiling(results, 0) == 800.0
    assert ceiling(results, 9) == 0.0
    assert saturation(results) == pytest.approx([700 / 800, 760 / 800, 720 / 800])


def test_the_offline_rate_is_that_of_the_faster_server() -> None:
    assert latency_bounded(part(small=False), "default") == pytest.approx([648 / 720])
    assert latency_bounded(part(small=False, throughput=790.0), "default") == pytest.approx([648 / 790])
    assert latency_bounded(part(small=False), "eager") == []


def test_the_report_on_a_gpu_states_the_targets_met() -> None:
    page = report({"parts": {"bert": part(small=False)}})
    assert "not measured on a GPU" not in page.lower()
    assert "on NVIDIA H100" in page
    assert "| bert: server at saturation ÷ bare IO-binding loop | ≥ 0.95 | 0.90 (0.88–0.95) | no |" in page
    assert "p99 within 130 ms, ÷ Offline (published systems: 0.79) | ≥ 0.85 | 0.90 | yes |" in page
    assert "| bert | 648 | – | – | 660 | 600 | 1.100 |" in page
    assert "| default, confirmed | 650 | 648 | 20.0 | 100.0 | 8.0 | 90% | yes | VALID |" in page
    assert "| no, 3 errors | INVALID |" in page
    assert "Not measured: CUDA graphs (this server has no --cuda-graphs)." in page
    assert "- eager warned: model.onnx is odd" in page
    assert "- eager warned: not JSON" in page
    # Busy 0.9; batches take 11 ms, and 8 rows / 750 per second in the loop with copies.
    assert "the device is busy 0.90 of the time; its batches take 1.03" in page


def test_the_report_without_a_gpu_says_so_and_meets_nothing() -> None:
    page = report({"parts": {"bert": part(small=True)}})
    assert page.startswith("**Not measured on a GPU.**")
    assert "0.90 (0.88–0.95) | – |" in page
    assert "differ by noise alone" in page


def test_the_report_names_a_part_that_broke_off() -> None:
    broken = part(small=False)
    broken.update(
        failure="LoadError: 1 of the 11 load processes have ended",
        offline=[],
        server=[],
        peaks={},
        predicted=None,
    )
    page = report({"parts": {"bert": broken}})
    assert "**bert did not run to its end:** LoadError: 1 of the 11 load processes have ended" in page
    assert "| bert | – | – | – | – | – | – |" in page
    barely = {**broken, "loop": [], "skipped": {}, "warnings": {}}
    del barely["minutes"], barely["max_batch_size"], barely["predicted"]
    assert "did not run to its end" in report({"parts": {"bert": barely}})


def test_figures_of_a_gpu_are_not_replaced_by_those_of_a_cpu(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"{SECTION.begin}\n{SECTION.end}\n")
    cpu, gpu = (report({"parts": {"bert": part(small=small)}}) for small in (True, False))
    write(page, cpu)
    assert page.read_text() == f"{SECTION.begin}\n\n{cpu}\n\n{SECTION.end}\n"
    for text in (gpu, cpu):
        write(page, text)
        assert page.read_text() == f"{SECTION.begin}\n\n{gpu}\n\n{SECTION.end}\n"
