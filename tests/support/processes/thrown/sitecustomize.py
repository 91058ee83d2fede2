"""Throws exceptions into threads of the process that imports this, on request of `support.processes.thrower`.

Python imports it at the start of each process that has this folder in PYTHONPATH, so the product needs no code for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

# Folder with a socket for each process, whose name is the process's id.
FOLDER = "THROWN_FOLDER"
# Functions in which a thread waits, and those that call them to wait for work, and not for something within a call.
_WAITS = frozenset({"_serve", "poll", "select", "wait"})
_LOOPS = frozenset({"_expire_until_closed", "_next", "_run", "_run_until_closed", "_serve", "handle_request"})
_RAISED: dict[str, int] = {}


class ThrownError(Exception):
    """The exception; Python creates it on the thread into which it was thrown."""

    def __init__(self) -> None:
        name = threading.current_thread().name
        _RAISED[name] = _RAISED.get(name, 0) + 1
        super().__init__("thrown by a test")


def _waits(frame: FrameType | None) -> bool:
    """Return whether a thread with this innermost frame waits for work."""
    if frame is None or frame.f_code.co_name not in _WAITS:
        return False
    while frame is not None and frame.f_code.co_name not in _LOOPS:
        # A function of grpcio for one call.
        if frame.f_code.co_name in ("_look_for_request", "_call_behavior"):
            return False
        frame = frame.f_back
    return frame is not None


def _throw(name: str, only_waiting: bool) -> bool:
    thread = next((each for each in threading.enumerate() if each.name == name), None)
    if thread is None or thread.ident is None:
        return False
    if only_waiting and not _waits(sys._current_frames().get(thread.ident)):
        return False
    thrown: int = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(ThrownError)
    )
    return thrown == 1


def _serve_requests(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            # Clients have taken every file that the process may open.
            time.sleep(0.1)
            continue
        with connection, connection.makefile("rw") as stream:
            asked: Any = json.loads(stream.readline())
            answer: Any = {each.name: _RAISED.get(each.name, 0) for each in threading.enumerate()}
            if asked is not None:
                answer = _throw(*asked)
            stream.write(json.dumps(answer) + "\n")


if FOLDER in os.environ:
    _listening = socket.socket(socket.AF_UNIX)
    _listening.bind(os.path.join(os.environ[FOLDER], str(os.getpid())))
    _listening.listen()
    threading.Thread(target=_serve_requests, args=(_listening,), name="thrower", daemon=True).start()
