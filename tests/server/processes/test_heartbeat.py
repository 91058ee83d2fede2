"""A server process's answers to the supervisor's pings: it calls itself."""

from __future__ import annotations

import errno
import os
import queue
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from polling import PATIENCE, until

from tensorferry.server.app import App, OneOfSeveral
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.grpc_server import Listener
from tensorferry.server.inference.suspects.crash_watch import CrashWatch
from tensorferry.server.processes.peers import Peers
from tensorferry.server.processes.running_page import RunningPage, create_page, read_page
from tensorferry.server.processes.server import Heartbeat
from tensorferry.server.processes.suspect_requests import TrialLock


def test_a_process_without_a_free_file_counts_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other connections may be served."""

    def no_file(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    alive: queue.SimpleQueue[None] = queue.SimpleQueue()
    heartbeat = Heartbeat(tmp_path / "self-0", lambda: alive.put(None))
    monkeypatch.setattr(os, "eventfd", no_file)
    assert heartbeat.ask().code() is grpc.StatusCode.UNAVAILABLE
    alive.get(timeout=PATIENCE)


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


def test_a_process_notes_that_it_loads_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not answer: native code may let no other thread run, while the file is imported and while the model runs."""
    page = create_page()
    watch = CrashWatch(RunningPage(os.dup(page)), TrialLock(tmp_path, lambda: True))
    noted: list[bool] = []
    monkeypatch.setitem(sys.modules, "noting", SimpleNamespace(note=lambda: noted.append(read_page(page)[0])))
    file = tmp_path / "models" / "m" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from noting import note\nfrom tensorferry.serving import FP32, model\nnote()\n"
        "@model(inputs={'x': FP32[-1]}, outputs={'y': FP32[-1]})\ndef m(x):\n    note()\n    return x\n"
    )
    config = ServerConfig((), model_repositories=(tmp_path / "models",), model_control="poll", device="cpu")
    listener, peers = Listener("127.0.0.1", 0), Peers(tmp_path, 0, 1)
    app = App(config, several=OneOfSeveral(listener, peers, watch, lambda: (), {}))
    app.load()
    assert len(noted) > 1
    assert all(noted)
    assert read_page(page) == (False, [])
    assert app.stop()
    os.close(page)
