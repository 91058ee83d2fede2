"""Memory of a GPU that one call of the client sets up.

Client and server run with a stand-in for the driver's library; and with the real one if there is a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest
from client import docstrings
from client.conftest import DIGITS
from client.memory import cuda_calls
from client.scripted import ScriptedServer
from support.processes.server import running
from support.wire.device_memory import build_stand_in, gpu_is_here

from tensorferry.client import InferenceClient
from tensorferry.protos import inference_pb2 as pb

LONGEST = 100

EXAMPLES = [
    name
    for name, kind in docstrings.public_objects()
    if docstrings.needs_a_gpu(name) and docstrings.examples(kind)
]


class Rig(NamedTuple):
    """A server with the model `digits`, and a process for clients, both with the same driver."""

    options: tuple[str, ...]
    address: str
    child: ProcessPoolExecutor

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        self.child.submit(function, *arguments).result(LONGEST)


@pytest.fixture(scope="module", params=["stand-in", "gpu"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    pytest.importorskip(
        "cuda.bindings", reason="NO cuda-bindings: the client's memory of a GPU was not tested"
    )
    options: tuple[str, ...] = (f"digits={DIGITS}", "--allow-shared-memory")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "stand-in":
            library = build_stand_in(tmp_path_factory.mktemp("cuda"))
            if library is None:
                pytest.skip("NO C COMPILER: the client's memory of a GPU was not tested with the stand-in")
            # The server and the child find the stand-in there. Models run on the CPU.
            patch.setenv("LD_LIBRARY_PATH", str(library.parent))
            options = (*options, "--device", "cpu")
        elif not gpu_is_here():
            pytest.skip("NO GPU: the client's memory of a GPU was not tested with a real one")
        spawn = multiprocessing.get_context("spawn")
        # The stand-in has two GPUs elsewhere.
        one_gpu = {"STAND_IN_GPUS": "1"}
        with (
            running(*options, transport="lane", variables=one_gpu) as server,
            ProcessPoolExecutor(1, mp_context=spawn) as child,
        ):
            yield Rig(options, server.address, child)


@pytest.fixture
def stand_in(rig: Rig) -> Rig:
    if "--device" not in rig.options:
        pytest.skip("a real GPU does not fail on demand")
    return rig


@pytest.mark.parametrize("check", cuda_calls.WITH_A_GPU, ids=lambda check: str(check.__name__))
def test_with_a_gpu(rig: Rig, check: Any) -> None:
    rig.run(cuda_calls.run, check, rig.address)


@pytest.mark.parametrize("check", cuda_calls.WITH_THE_STAND_IN, ids=lambda check: str(check.__name__))
def test_with_the_stand_in(stand_in: Rig, check: Any) -> None:
    stand_in.run(cuda_calls.run, check, stand_in.address)


def test_a_server_that_is_gone(rig: Rig) -> None:
    rig.run(cuda_calls.a_server_that_is_gone, *rig.options)


def test_memory_is_freed_after_its_last_use(stand_in: Rig, server: ScriptedServer) -> None:
    """A request whose timeout has passed at the client can still run, and write its outputs."""
    child = stand_in.child.submit(os.getpid).result(LONGEST)
    allocated: list[int] = []

    def status() -> pb.CudaSharedMemoryStatusResponse:
        allocated.append(len(cuda_calls.allocations(child)))
        answer = pb.CudaSharedMemoryStatusResponse()
        if len(allocated) < 3:
            answer.regions[server.servicer.request.name].byte_size = 1
        return answer

    server.servicer.cuda_status = status
    server.servicer.shares_memory = True
    stand_in.run(cuda_calls.run, cuda_calls.memory_that_is_not_used, server.target)
    # The last question is that of `run`, after the memory was freed.
    assert allocated == [1, 1, 1, 0]


def test_a_server_without_shared_memory(rig: Rig, server: ScriptedServer) -> None:
    rig.run(cuda_calls.run, cuda_calls.a_server_without_shared_memory_refuses, server.target)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_right(rig: Rig, name: str) -> None:
    rig.run(cuda_calls.run_examples, name, rig.address)


def test_without_cuda_bindings(client: InferenceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with (
        pytest.raises(ImportError, match="cuda-bindings, which is not installed: pip install cuda-bindings"),
        cuda_calls.shared(client, 2),
    ):
        raise AssertionError("created")


def test_without_the_driver(client: InferenceClient) -> None:
    pytest.importorskip(
        "cuda.bindings", reason="NO cuda-bindings: a machine without the driver was not tested"
    )
    if gpu_is_here():
        pytest.skip("a GPU is here")
    with pytest.raises(OSError, match="CUDA: cuInit"), cuda_calls.shared(client, 2):
        raise AssertionError("created")
