"""Questions of the server processes to each other."""

from __future__ import annotations

import queue
import resource
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from polling import PATIENCE

from tensorferry.server.processes import peers as peers_module
from tensorferry.server.processes.peers import Peers


@pytest.fixture
def two(tmp_path: Path) -> Sequence[Peers]:
    """Two of three processes. The third has never started."""
    peers = [Peers(tmp_path, index, 3) for index in range(2)]
    for index, each in enumerate(peers):
        each.on("who", lambda content, index=index: content + str(index).encode())  # type: ignore[misc]
        each.start()
    return peers


def test_all_that_run_answer_and_the_own_answer_is_the_first(two: Sequence[Peers]) -> None:
    large = b"\n" + bytes(1 << 20)
    assert two[0].ask("who", large) == [large + b"0", large + b"1"]
    assert two[1].ask("who") == [b"1", b"0"]


def test_a_process_that_cannot_answer_is_left_out_and_answers_the_next_question(two: Sequence[Peers]) -> None:
    def fail(content: bytes) -> bytes:
        raise KeyError("no such model")

    two[0].on("model", lambda content: b"own")
    two[1].on("model", fail)
    assert two[0].ask("model") == [b"own"]
    assert two[0].ask("who") == [b"0", b"1"]


def test_the_sockets_of_killed_processes_do_not_matter(two: Sequence[Peers], tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as killed:
        killed.bind(str(tmp_path / "peer-2"))
    assert two[0].ask("who") == [b"0", b"1"]
    next_one = Peers(tmp_path, 2, 3)
    next_one.on("who", lambda content: b"2")
    next_one.start()
    assert two[0].ask("who") == [b"0", b"1", b"2"]


def test_a_process_that_hangs_is_left_out(
    two: Sequence[Peers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_ANSWER_SECONDS", 0.5)
    with closing(socket.socket(socket.AF_UNIX)) as hanging:
        hanging.bind(str(tmp_path / "peer-2"))
        hanging.listen()
        assert two[0].ask("who") == [b"0", b"1"]


def test_all_are_asked_before_the_first_answer_is_waited_for(two: Sequence[Peers], tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as third:
        third.bind(str(tmp_path / "peer-2"))
        third.listen()

        def after_the_third(content: bytes) -> bytes:
            with third.accept()[0] as connection:
                assert connection.recv(1)
            return b"asked"

        two[1].on("who", after_the_third)
        assert two[0].ask("who") == [b"0", b"asked"]


def test_without_a_free_file_it_waits_before_it_accepts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: queue.SimpleQueue[None] = queue.SimpleQueue()
    free: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wait() -> None:
        paused.put(None)
        free.get()

    monkeypatch.setattr(peers_module, "RestartBackoff", lambda: SimpleNamespace(wait=wait))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    one, other = (Peers(tmp_path, index, 2) for index in range(2))
    for each in (one, other):
        each.on("who", lambda content: b"here")
    other.start()
    with socket.socket(socket.AF_UNIX) as connection:
        # The file of its connection is there before the limit.
        connection.connect(str(tmp_path / "peer-1"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        paused.get(timeout=PATIENCE)
        assert paused.empty()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        free.put(None)
    assert one.ask("who") == [b"here", b"here"]
