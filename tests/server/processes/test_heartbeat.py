"""A server process's answers to the supervisor's pings: it calls itself."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from polling import PATIENCE, until

from tensorferry.server.processes.server import Heartbeat


def test_a_process_is_alive_while_its_server_answers(tmp_path: Path) -> None:
    socket = tmp_path / "self-0"
    # That of the process before.
    socket.touch()
    alive: queue.SimpleQueue[None] = queue.SimpleQueue()
    heartbeat = Heartbeat(socket, lambda: alive.put(None))
    assert heartbeat.ask().code() is grpc.StatusCode.UNAVAILABLE
    assert alive.empty()
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        assert server.add_insecure_port(f"unix:{heartbeat.socket}")
        server.start()
        until(lambda: heartbeat.ask().code() is grpc.StatusCode.UNIMPLEMENTED)
        alive.get(timeout=PATIENCE)
        server.stop(None).wait()
