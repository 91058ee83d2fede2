"""`make gpu-check` with the CPU as the device: it passes, and it finds faults."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

import gpu_check
import gpu_failures
import numpy as np
import pytest
from support.models import small
from support.server.cpu_as_device import CpuDeviceMemory

from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.errors import StartError
from tensorferry.server.gpu.pinned_memory import MemoryBlock
from tensorferry.server.runtime.sampling import random_inputs
from tensorferry.server.runtime.session import Session


@pytest.mark.parametrize("name", ["mlp in FP32", "echo of BF16", "mixing"])
def test_a_correct_device_passes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = [case for case in gpu_check.cases(tmp_path) if case.name == name]
    assert gpu_check.check(case, "cpu", CpuDeviceMemory()) == []
    assert f"gpu-check: {name}, alone, with CUDA graphs: differs by 0" in capsys.readouterr().out


class SharedHostBlocks(CpuDeviceMemory):
    """Faulty memory: every host block is the same."""

    def __init__(self) -> None:
        self.all = super().host(1 << 20)

    def host(self, nbytes: int) -> MemoryBlock:
        return MemoryBlock(self.all.address, nbytes, lambda: self.all)


class TruncatedLoads(CpuDeviceMemory):
    """Faulty memory: only the first 32 bytes are copied to the device."""

    def load(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, min(nbytes, 32))


@pytest.mark.parametrize("memory", [SharedHostBlocks, TruncatedLoads])
def test_a_faulty_device_is_found(memory: type[CpuDeviceMemory], tmp_path: Path) -> None:
    case = gpu_check.Case("mlp", small.mlp(tmp_path / "m.onnx"), "FP32")
    assert any("without CUDA graphs: " in line for line in gpu_check.check(case, "cpu", memory()))


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0])
def test_the_greatest_difference_is_found(value: float) -> None:
    right, wrong = np.array([1, np.nan, -np.inf]), np.array([value, np.nan, -np.inf])
    assert gpu_check.difference({"y": right}, {"y": right.copy()}) == 0
    assert gpu_check.difference({"y": right}, {"y": wrong}) >= 1
    assert gpu_check.difference({"y": right}, {"y": right[:2]}) == np.inf


@pytest.mark.parametrize("name", [name for name in DATATYPES if name != "BYTES"])
def test_every_datatype_has_a_model_that_computes(name: str, tmp_path: Path) -> None:
    (case,) = [case for case in gpu_check.cases(tmp_path) if case.name == f"half of {name}"]
    session = Session(case.path, "cpu")
    inputs = random_inputs(session.signature, 64, case.size)
    halves = session.run(inputs)["y"]
    assert halves.shape == inputs["x"].shape
    # Outputs differ from inputs, so an output that is never written would be found.
    assert name == "BOOL" or np.count_nonzero(halves != inputs["x"]) > halves.size / 4
    assert gpu_check.check(case, "cpu", CpuDeviceMemory()) == []


def test_without_a_gpu_it_reports_that_nothing_was_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(wanted: str) -> str:
        raise StartError("there is none")

    monkeypatch.setattr(gpu_check, "choose_device", none)
    assert gpu_check.main([]) == 0
    assert "NOTHING WAS CHECKED, not measured on a GPU: there is none" in capsys.readouterr().out


def test_parts_can_be_selected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[object] = []

    def note(what: object, *wrong: str) -> list[str]:
        ran.append(what)
        return list(wrong)

    monkeypatch.setattr(gpu_check, "choose_device", lambda wanted: "cuda:0")
    monkeypatch.setattr(gpu_check, "cases", lambda folder: note("models"))
    monkeypatch.setattr(gpu_failures, "check", lambda device, folder: note("failures", "lost"))
    monkeypatch.setattr(gpu_check, "on_cuda", lambda tests, seconds: note(tuple(tests)))
    assert gpu_check.main(["--only", "models"]) == 0
    assert gpu_check.main(["--only", "failures"]) == 1
    assert gpu_check.main(["--only", "tests", "tests/wire"]) == 0
    assert ran == ["models", "failures", ("tests/wire",)]
    assert "gpu-check: WRONG: lost" in capsys.readouterr().out
    assert gpu_check.main([]) == 1
    assert ran[3:] == ["models", "failures", gpu_check.TESTS]


def test_a_case_that_raises_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(case: object, device: str) -> list[str]:
        raise RuntimeError("CUDA failure 2")

    one = gpu_check.Case("one", Path("one.onnx"), "FP32")
    monkeypatch.setattr(gpu_check, "cases", lambda folder: [one, one])
    monkeypatch.setattr(gpu_check, "check", fail)
    assert gpu_check.run(["models"], (), "cuda:0", 60.0) == ["one: RuntimeError: CUDA failure 2"] * 2


def test_a_time_out_of_the_tests_is_reported(tmp_path: Path) -> None:
    test = tmp_path / "test_long.py"
    test.write_text("import threading\ndef test_long():\n    threading.Event().wait(100)\n")
    # A shell's background jobs ignore SIGINT, and so do the processes that they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        (line,) = gpu_check.on_cuda([str(test), "-n0", "-p", "no:cacheprovider"], 0.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert line.startswith("the tests did not end within 0 s")
