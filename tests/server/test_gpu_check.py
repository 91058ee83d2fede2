"""What `make gpu-check` runs on a GPU, run here on the CPU as a device; and that it finds what is wrong."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gpu_check
import numpy as np
import pytest
from server import models

from tensorferry.server.memory import Block, CpuMemory


@pytest.mark.parametrize("name", ["mlp in FP32", "echo of BF16", "mixing"])
def test_what_is_right(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = [case for case in gpu_check.cases(tmp_path) if case.name == name]
    assert gpu_check.check(case, "cpu", CpuMemory()) == []
    assert f"gpu-check: {name}, alone, with CUDA graphs: differs by 0" in capsys.readouterr().out


class Shared(CpuMemory):
    """Gives the same host memory out again and again, as if nobody had answers there."""

    def __init__(self) -> None:
        self.all = super().host(1 << 20)

    def host(self, nbytes: int) -> Block:
        return Block(self.all.address, nbytes, lambda: self.all)


class Deaf(CpuMemory):
    """Copies the first bytes alone to the device."""

    def load(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, min(nbytes, 32))


@pytest.mark.parametrize("memory", [Shared, Deaf])
def test_what_is_wrong(memory: type[CpuMemory], tmp_path: Path) -> None:
    case = gpu_check.Case("mlp", models.mlp(tmp_path / "m.onnx"), "FP32")
    assert any("without CUDA graphs: " in line for line in gpu_check.check(case, "cpu", memory()))


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0])
def test_differences(value: float) -> None:
    right, wrong = np.array([1, np.nan, -np.inf]), np.array([value, np.nan, -np.inf])
    assert gpu_check.difference({"y": right}, {"y": right.copy()}) == 0
    assert gpu_check.difference({"y": right}, {"y": wrong}) >= 1
    assert gpu_check.difference({"y": right}, {"y": right[:2]}) == np.inf
