"""Which cores there are, and how they are divided."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from tensorferry.server import cores
from tensorferry.server.cores import Division, models_use_gpu, runtime_threads, usable_cores


@pytest.mark.parametrize(
    ("cpu_max", "found"),
    [
        ("max 100000\n", 8),
        ("400000 100000\n", 4),
        ("150000 100000\n", 2),
        ("10000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("", 8),
        (None, 8),
    ],
)
def test_the_cores_are_those_of_the_affinity_and_of_the_quota(
    cpu_max: str | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    file = tmp_path / "cpu.max"
    if cpu_max is not None:
        file.write_text(cpu_max)
    assert usable_cores(file) == found


# Cores, front-ends, and threads of each session.
WITH_GPU = [(1, 0, 0), (3, 0, 0), (4, 2, 1), (5, 3, 1), (6, 4, 1), (8, 4, 3), (16, 4, 4), (128, 4, 4)]
WITHOUT_GPU = [(1, 0, 0), (15, 0, 0), (16, 2, 13), (24, 3, 20), (32, 4, 27), (128, 4, 123)]


@pytest.mark.parametrize(
    ("count", "front_ends", "threads", "gpu"),
    [*((*each, True) for each in WITH_GPU), *((*each, False) for each in WITHOUT_GPU)],
)
def test_auto(count: int, front_ends: int, threads: int, gpu: bool) -> None:
    division = Division.automatic(count, gpu=gpu)
    assert division == Division(count, front_ends, gpu)
    if front_ends:
        assert runtime_threads(count, front_ends, gpu=gpu) == threads


@pytest.mark.parametrize("gpu", [False, True])
def test_what_auto_chooses_fits(gpu: bool) -> None:
    for count in range(1, 257):
        front_ends = Division.automatic(count, gpu=gpu).front_ends
        if front_ends:
            assert front_ends + 1 + runtime_threads(count, front_ends, gpu=gpu) <= count


@pytest.mark.parametrize(
    ("count", "front_ends", "gpu", "threads"),
    [
        (2, 2, False, 1),
        (4, 2, False, 2),
        (8, 2, False, 5),
        (8, 8, False, 4),
        (1, 4, False, 1),
        (2, 2, True, 1),
        (16, 2, True, 4),
    ],
)
def test_threads_with_a_number_that_the_operator_chose(
    count: int, front_ends: int, gpu: bool, threads: int
) -> None:
    assert runtime_threads(count, front_ends, gpu=gpu) == threads


@pytest.mark.parametrize(
    ("division", "text"),
    [
        (
            Division(16, 4, True),
            "16 cores, models on a GPU: front-ends 4, engine 1, threads of ONNX Runtime for each session 4",
        ),
        (
            Division(1, 0, False),
            "1 core, models on the CPU: one process does all, because front-ends need 16 cores",
        ),
        (
            Division(2, 0, True),
            "2 cores, models on a GPU: one process does all, because front-ends need 4 cores",
        ),
    ],
)
def test_the_line_of_the_log(division: Division, text: str) -> None:
    assert str(division) == text


@pytest.mark.parametrize(
    ("device", "provider", "driver", "found"),
    [
        ("cpu", True, True, False),
        ("cuda", False, False, True),
        ("cuda:1", False, False, True),
        ("auto", True, True, True),
        ("auto", False, True, False),
        ("auto", True, False, False),
    ],
)
def test_whether_models_use_a_gpu(
    device: str, provider: bool, driver: bool, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "onnxruntime"
    (package / "capi").mkdir(parents=True)
    if provider:
        (package / "capi" / "libonnxruntime_providers_cuda.so").touch()
    (tmp_path / "nvidia-uvm").touch()
    if driver:
        (tmp_path / "nvidia3").touch()
    spec = ModuleSpec("onnxruntime", None, origin=str(package / "__init__.py"))
    monkeypatch.setattr(cores, "find_spec", lambda name: spec)
    assert models_use_gpu(device, tmp_path) is found


def test_without_onnx_runtime_no_model_uses_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none: Any = None
    monkeypatch.setattr(cores, "find_spec", lambda name: none)
    assert not models_use_gpu("auto", tmp_path)
