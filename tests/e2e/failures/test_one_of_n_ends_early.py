"""One of N requests of a batch ends early, in every possible way: the others get their right answers.

The window is ten minutes, so a batch closes only when it is full, and the tests choose its members.
A running batch runs until it is released.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from e2e.fixtures import Serve
from support.processes.faulty import HANG
from support.processes.metrics import scrape, scrape_until
from support.processes.probe import OpenStream, answer, batch_of, output, request
from support.processes.server import ServerProcess, running

from tensorferry.protos import inference_pb2_grpc

SIZE = 6
NEIGHBOURS = range(1, 4)
VICTIM = 9
FILLERS = range(20, 23)
RUNNING = 50


@dataclass
class Scene:
    """A server whose batches close only when they are full, and its clients."""

    channel: grpc.Channel
    stub: inference_pb2_grpc.GRPCInferenceServiceStub
    others: OpenStream
    release: Path
    server: ServerProcess

    def fill(self) -> None:
        """Send further requests until the batch has closed and the neighbours have their answers."""
        for tag in FILLERS:
            self.others.send(request(tag))
            if all(str(tag) in self.others.answers for tag in NEIGHBOURS):
                return
        self.await_neighbours()

    def metric(self, name: str) -> float:
        return scrape(self.server)[name]

    def await_metric(self, name: str, value: int) -> None:
        """Return once the metric has this value."""
        scrape_until(self.server, lambda found: found[name] == value)

    def await_running(self, requests: int = SIZE) -> None:
        """Return once a batch of this many requests is running."""
        self.await_metric("tensorferry_running_requests", requests)

    def await_neighbours(self) -> None:
        for tag in NEIGHBOURS:
            self.others.await_answer(str(tag))

    def check_neighbours(self, *, same_batch: bool = True, first: float | None = None) -> None:
        responses = [self.others.answers[str(tag)] for tag in NEIGHBOURS]
        for tag, response in zip(NEIGHBOURS, responses, strict=True):
            assert not response.error_message
            np.testing.assert_array_equal(output(response.infer_response), answer(tag, first=first))
        batches = {batch_of(response.infer_response) for response in responses}
        assert len(batches) == 1 or not same_batch


OPTIONS = ("--max-batch-size", SIZE, "--max-queue-delay-ms", 600_000, "--metrics-port", 0)


@contextmanager
def set_up(server: ServerProcess, release: Path) -> Iterator[Scene]:
    with grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        scene = Scene(channel, stub, OpenStream(channel), release, server)
        yield scene
        release.touch()
        scene.others.cancel()
        # No request of this test is in a batch of the next.
        scene.await_metric("tensorferry_queued_requests", 0)


@pytest.fixture(scope="module")
def server(transport: str, probe_model: Path) -> Iterator[ServerProcess]:
    with running(probe_model, *map(str, OPTIONS), transport=transport) as server:
        yield server


@pytest.fixture
def scene(server: ServerProcess, tmp_path: Path) -> Iterator[Scene]:
    with set_up(server, tmp_path / "release") as scene:
        yield scene


@pytest.fixture
def held_scene(serve_faulty: Serve, tmp_path: Path) -> Iterator[Scene]:
    """On a separate server, because the server learns batch times from a batch that is held."""
    release = tmp_path / "release"
    with set_up(serve_faulty(*OPTIONS, FAULTY_RELEASE=str(release)), release) as scene:
        yield scene


def test_one_cancels_while_queued(scene: Scene) -> None:
    scene.others.send(*(request(tag) for tag in NEIGHBOURS))
    victim = OpenStream(scene.channel)
    victim.send(request(VICTIM))
    victim.cancel()
    scene.fill()
    scene.check_neighbours()
    assert str(VICTIM) not in victim.answers


def test_one_cancels_while_running(held_scene: Scene) -> None:
    victim = OpenStream(held_scene.channel)
    victim.send(request(VICTIM))
    others = [request(tag, first=HANG) for tag in NEIGHBOURS]
    held_scene.others.send(*others, *(request(tag) for tag in FILLERS[:2]))
    held_scene.await_running()
    victim.cancel()
    # It no longer runs: the server has seen the cancel.
    held_scene.await_metric("tensorferry_running_requests", SIZE - 1)
    held_scene.release.touch()
    held_scene.await_neighbours()
    held_scene.check_neighbours(first=HANG)
    assert str(VICTIM) not in victim.answers


def test_the_deadline_of_one_passes_while_queued(held_scene: Scene) -> None:
    # Behind a longer batch, because a free worker would close the window for the deadline.
    held_scene.others.send(request(RUNNING, rows=SIZE, first=HANG))
    held_scene.await_running(1)
    held_scene.others.send(*(request(tag) for tag in NEIGHBOURS))
    with pytest.raises(grpc.RpcError) as caught:
        held_scene.stub.ModelInfer(request(VICTIM), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    held_scene.release.touch()
    held_scene.fill()
    held_scene.check_neighbours()


def test_the_deadline_of_one_passes_while_running(held_scene: Scene) -> None:
    others = [request(tag, first=HANG) for tag in NEIGHBOURS]
    held_scene.others.send(*others, *(request(tag) for tag in FILLERS[:2]))
    timeout, victim = 0.25, None
    # The batch cannot close without it, and a busy machine may need more time.
    while not held_scene.metric("tensorferry_running_requests"):
        if victim is None or victim.done():
            timeout *= 2
            victim = held_scene.stub.ModelInfer.future(request(VICTIM), timeout=timeout)
    assert victim is not None
    assert victim.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    held_scene.release.touch()
    held_scene.await_neighbours()
    held_scene.check_neighbours(first=HANG)


@pytest.mark.parametrize("position", ["first", "last"])
def test_one_makes_the_model_raise(scene: Scene, position: str) -> None:
    neighbours = [request(tag) for tag in NEIGHBOURS]
    poisoned = request(VICTIM, index=99)
    members = [poisoned, *neighbours] if position == "first" else [*neighbours, poisoned]
    scene.others.send(*members, *(request(tag) for tag in FILLERS[:2]))
    scene.await_neighbours()
    scene.check_neighbours(same_batch=False)
    failed = scene.others.await_answer(str(VICTIM))
    assert "out of data bounds" in failed.error_message
    assert failed.infer_response.parameters["tensorferry_status"].string_param == "INTERNAL"
