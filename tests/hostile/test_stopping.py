"""After SIGTERM every call ends with its response or with UNAVAILABLE."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from fuzz.attackers.raw import PREFIX
from polling import PATIENCE, until
from support.processes.server import ServerProcess
from support.server.rig import request

ROUNDS, CALLERS, CONCURRENT_CALLS = 2, 4, 8
MIN_RESPONSES = 50
MESSAGE = request({"x": np.zeros((1, 3), np.float32)}, model="m").SerializeToString()
OK = grpc.StatusCode.OK.name


class Callers:
    """Threads with their own connections; each keeps some calls in progress until it is closed."""

    def __init__(self, address: str) -> None:
        self.ends: Counter[str] = Counter()
        # Guards `ends`.
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._address = address
        self._threads = [threading.Thread(target=self._call, name=f"caller-{n}") for n in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def await_responses(self) -> None:
        until(lambda: self.ends[OK], lambda count: count >= MIN_RESPONSES)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _call(self) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        with grpc.insecure_channel(self._address, options) as channel:
            unary: Any = channel.unary_unary(PREFIX + "ModelInfer")
            stream: Any = channel.stream_stream(PREFIX + "ModelStreamInfer")
            while not self._over.is_set():
                calls = [unary.future(MESSAGE, timeout=PATIENCE) for _ in range(CONCURRENT_CALLS)]
                self._record(lambda: list(stream(iter([MESSAGE, MESSAGE]), timeout=PATIENCE)))
                for call in calls:
                    self._record(call.result)

    def _record(self, end: Callable[[], object]) -> None:
        try:
            end()
            code = OK
        except grpc.RpcError as error:
            known: Any = error
            code = known.code().name
        with self._lock:
            self.ends[code] += 1


def test_no_call_is_cancelled(transport: str, echo_model: Path) -> None:
    for _ in range(ROUNDS):
        server = ServerProcess.start(f"m={echo_model}", transport=transport)
        callers = Callers(server.address)
        try:
            callers.await_responses()
        finally:
            code = server.stop()
            callers.close()
        assert code == 0, server.log
        assert not server.errors()
        assert set(callers.ends) <= {OK, "UNAVAILABLE"}
