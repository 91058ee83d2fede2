"""Smoke test of each benchmark, through its command line, with the smallest load that it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from serving.reporting.report import generated

# Some of them take half a minute on a quiet machine.
pytestmark = pytest.mark.timeout(400)

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_TINY_MODEL = ("--layers=2", "--width=64", "--positions=1")


def run(folder: Path, *words: object) -> str:
    """Return the output of a script, or of a module if its name has no suffix."""
    script, *rest = map(str, words)
    program = [str(_BENCHMARKS / script)] if script.endswith(".py") else ["-m", script]
    paths = os.pathsep.join([str(_BENCHMARKS), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, *program, *rest],
        env={**os.environ, "PYTHONPATH": paths, "TENSORFERRY_BENCH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def load() -> Path:
    """Return the load generator in C, which `make test-benchmarks` builds."""
    program = Path(os.environ.get("LOAD", _BENCHMARKS.parent / ".venv" / "load"))
    assert program.is_file(), "make test-benchmarks builds the load generator"
    return program


# The arguments of a command, and a part of what it prints.
_COMMANDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "bench-overhead": (("overhead.py", "--requests=400", "--rounds=1"), "us a request"),
    "simulate, closed loops": (("closed_loop.py", "--seconds=1"), "of best count"),
    "bench-overload": (
        ("overload.py", "--rounds=1", "--seconds=0.4", "--deadline-ms=500", *_TINY_MODEL, "--loads", "3"),
        "| lag p99 ms |",
    ),
    "bench-overload APART=": (
        ("overload.py", "--rounds=1", "--seconds=0.4", "--apart=2,0.1", "--loads", "0.5"),
        "| lag p99 ms |",
    ),
}


@pytest.mark.parametrize("name", _COMMANDS)
def test_a_benchmark_without_the_load_generator(name: str, tmp_path: Path) -> None:
    words, said = _COMMANDS[name]
    assert said in run(tmp_path, *words)


# With the load generator.
_LOADED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "bench-observability": (("serving.observability", "--quick", "--only=metrics and"), "us CPU a call"),
    "bench-agreement": (("load_test_agreement.py", "--quick"), "| tiny | 32 | requests/s |"),
    "bench-processes": (("processes.py", "--quick"), "| mlp, 32 in flight | 1 |"),
    "gpu-bench": (("gpu.run", "--quick", "--only=resnet", "--seconds=5"), "not measured on a GPU"),
    "bench-python": (("python_models.run", "--quick", "--only=steps"), "an empty step"),
}


@pytest.mark.parametrize("name", _LOADED)
def test_a_benchmark_with_the_load_generator(name: str, load: Path, tmp_path: Path) -> None:
    (script, *words), said = _LOADED[name]
    assert said in run(tmp_path, script, "--load", load, *words)


def test_bench_and_its_page(load: Path, tmp_path: Path) -> None:
    words = ("--quick", "--only=tensorferry lane", "--models=tiny")
    assert "unary       32 in flight" in run(tmp_path, "serving.run", "--load", load, *words)
    results = tmp_path / "results" / "quick.json"
    page = generated(json.loads(results.read_text()))
    assert "| tensorferry lane |" in page
    if find_spec("matplotlib"):
        run(tmp_path, "serving.reporting.report", "--results", results, "--docs", tmp_path)
        assert page in (tmp_path / "performance.md").read_text()
