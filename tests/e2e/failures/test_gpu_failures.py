"""The failures of `make gpu-check`, on a simulated device; and that the check finds wrong behaviour."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gpu_failures
import grpc
import pytest
from support.processes import broken_gpu, faulty
from support.processes.server import ServerProcess

from tensorferry.protos import inference_pb2_grpc

FAULTY = [sys.executable, str(Path(faulty.__file__))]


def _break(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address, [("grpc.enable_retries", 0)]) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert gpu_failures.infer(stub, faulty.ONCE, 1) == "UNAVAILABLE"


def test_no_request_is_lost_where_memory_runs_out(tmp_path: Path) -> None:
    machine = gpu_failures.Machine(("--device", "cpu"), FAULTY, {faulty.ROOM: "3"})
    assert gpu_failures.out_of_memory(tmp_path, machine, 1) == []


def test_memory_that_suffices_shows_nothing(tmp_path: Path) -> None:
    machine = gpu_failures.Machine(("--device", "cpu"))
    assert gpu_failures.out_of_memory(tmp_path, machine, 1) == [
        "out of memory: the memory sufficed, so nothing was shown"
    ]


def test_no_request_is_lost_where_the_device_is(tmp_path: Path) -> None:
    machine = gpu_failures.Machine(("--device", "cpu"), FAULTY, {faulty.VAIN: "1000000"})
    assert gpu_failures.lost(tmp_path, machine, _break) == []


def test_a_server_that_does_not_fail_is_reported(tmp_path: Path) -> None:
    machine = gpu_failures.Machine(("--device", "cpu"), FAULTY)
    wrong = gpu_failures.lost(tmp_path, machine, lambda server: server.signal())
    assert any("ended with code 0, not with 1" in line for line in wrong)


class Driver:
    """libcuda up to a kernel launch: each function records its name, and one of them fails."""

    def __init__(self, fails: str = "", result: int = 700) -> None:
        self.calls: list[str] = []
        self._fails, self._result = fails, result

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return self._result if name == self._fails else 0

        call.__name__ = name
        return call


def test_the_kernel_is_launched_and_waited_for() -> None:
    driver = Driver("cuCtxSynchronize")
    assert broken_gpu.break_gpu(driver) == 700
    assert driver.calls[-2:] == ["cuLaunchKernel", "cuCtxSynchronize"]


def test_a_kernel_that_cannot_be_loaded_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cuModuleLoadData says 218"):
        broken_gpu.break_gpu(Driver("cuModuleLoadData", 218))
