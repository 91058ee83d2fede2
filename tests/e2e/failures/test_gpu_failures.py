"""The failures of `make gpu-check`, on a simulated device; and that the check finds wrong behaviour."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gpu_failures
import grpc
from support.processes import faulty
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


def test_no_request_is_lost_where_the_device_is(tmp_path: Path) -> None:
    machine = gpu_failures.Machine(("--device", "cpu"), FAULTY, {faulty.VAIN: "1000000"})
    assert gpu_failures.lost(tmp_path, machine, _break) == []


def test_a_server_that_does_not_fail_is_reported(tmp_path: Path) -> None:
    machine = gpu_failures.Machine(("--device", "cpu"), FAULTY)
    wrong = gpu_failures.lost(tmp_path, machine, lambda server: server.signal())
    assert any("ended with code 0, not with 1" in line for line in wrong)
