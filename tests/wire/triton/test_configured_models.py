"""The queue policies of configured models on a real server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from support.processes import faulty
from support.processes.metrics import scrape_until
from support.processes.probe import OpenStream, answer, output, request
from support.processes.server import ServerProcess


class Held(NamedTuple):
    """A stream whose request 0 runs until it is released."""

    server: ServerProcess
    stream: OpenStream
    release: Path

    def send(self, tag: int, first: float | None = None, **parameters: int) -> None:
        """Send a request of one row; return when the server has accepted or refused it."""
        message = request(tag, first=first)
        for scalar in message.inputs[1:]:
            # In a configuration each row of a tensor has dims.
            scalar.shape[:] = [1, 1]
        for name, value in parameters.items():
            message.parameters[name].int64_param = value
        self.stream.send(message)

    def error(self, tag: int) -> tuple[str, str]:
        """Return status and message of a request that fails."""
        found = self.stream.await_answer(str(tag))
        return found.infer_response.parameters["tensorferry_status"].string_param, found.error_message

    def assert_answered(self, *tags: int) -> None:
        """Release request 0, and check that it and then these are run, and answered."""
        self.release.touch()
        for tag in (0, *tags):
            response = self.stream.await_answer(str(tag)).infer_response
            first = None if tag else faulty.HANG
            assert output(response).tolist() == answer(tag, first=first).tolist()
        batches = sorted(self.server.statuses()["probe"]["last_batches"], key=lambda batch: batch["started"])
        assert [member["id"] for batch in batches for member in batch["members"]] == [
            str(tag) for tag in (0, *tags)
        ]


Hold = Callable[..., Held]


@pytest.fixture
def hold(transport: str, probe_model: Path, tmp_path: Path) -> Iterator[Hold]:
    """Start a server whose model has this `dynamic_batching`, and hold request 0, with these parameters."""
    servers: list[Any] = []

    def start(batching: str, **parameters: int) -> Held:
        home = tmp_path / "models" / "probe"
        (home / "1").mkdir(parents=True)
        (home / "1" / "model.onnx").symlink_to(probe_model)
        (home / "config.pbtxt").write_text(f"max_batch_size: 1 dynamic_batching {{ {batching} }}")
        program = [sys.executable, str(Path(faulty.__file__))]
        variables = {faulty.RELEASE: str(tmp_path / "release")}
        # Without a check, whose large numbers would break the device.
        options = ("--model-repository", home.parent, "--batching", "trust")
        status = ("--metrics-port", "0", "--processes", "1")
        server = ServerProcess.start(
            *options, *status, transport=transport, program=program, variables=variables
        )
        channel = grpc.insecure_channel(server.address)
        servers.append((server, channel))
        held = Held(server, OpenStream(channel), tmp_path / "release")
        # From then on the requests of each batch are recorded.
        server.statuses()
        held.send(0, faulty.HANG, **parameters)
        scrape_until(server, lambda found: found["tensorferry_running_requests"] == 1)
        return held

    yield start
    for server, channel in servers:
        channel.close()
        assert server.stop() == 0, server.log


def test_a_queue_timeout_is_reported_while_the_model_runs(hold: Hold) -> None:
    # The running request has a policy of its own, because it may wait longer for a busy machine.
    levels = "priority_levels: 2 default_priority_level: 2 priority_queue_policy { key: 1 value { } }"
    held = hold(f"{levels} default_queue_policy {{ default_timeout_microseconds: 20000 }}", priority=1)
    held.send(1)
    code, message = held.error(1)
    assert code == "DEADLINE_EXCEEDED"
    assert "Request timeout expired" in message
    held.assert_answered()


def test_a_request_may_set_a_shorter_timeout_if_the_policy_allows_it(hold: Hold) -> None:
    policy = "default_timeout_microseconds: 60000000 allow_timeout_override: true"
    held = hold(f"default_queue_policy {{ {policy} }}")
    held.send(1, timeout=20_000)
    assert "Request timeout expired" in held.error(1)[1]
    held.assert_answered()


def test_a_requests_timeout_is_ignored_if_the_policy_does_not_allow_it(hold: Hold) -> None:
    held = hold("default_queue_policy { max_queue_size: 9 }")
    held.send(1, timeout=1)
    for tag in range(2, 11):
        held.send(tag)
    assert "Exceeds maximum queue size: 9 requests of priority 1 wait" in held.error(10)[1]
    held.assert_answered(*range(1, 10))


def test_priorities_are_strict(hold: Hold) -> None:
    policy = "priority_queue_policy { key: 2 value { max_queue_size: 3 } }"
    held = hold(f"priority_levels: 2 default_priority_level: 2 {policy}")
    for tag, priority in ((3, 2), (4, 0), (1, 1), (5, 7), (2, 1)):
        held.send(tag, priority=priority)
    held.send(6, priority=2)
    assert "3 requests of priority 2 wait, and the model's queue policy allows 3" in held.error(6)[1]
    held.assert_answered(1, 2, 3, 4, 5)
