"""Faults of servers, callers and the network, in an order that a seed gives."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from chaos.content import SUMS, request, write_model, write_sums
from chaos.faulty_server import MOST_FILES
from chaos.proxy import FAIR, FaultProxy, Weather
from chaos.servers import Busy, CallerProcesses, Server, exhaust_files
from hostile.resetting_client import STEPS, ResettingClient
from support.processes import observed, thrower

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

# Seconds between faults; each lasts longer, so that several overlap.
_PAUSE = (0.3, 2.0)
# Clients that reset their connection, for each step of a call, each time.
_RESETS = 10
_RESET_ROWS = 1000
# Kills of server processes for each time that another fault occurs.
_KILLS = 3
# Exceptions that are thrown, for each time that another fault occurs.
_THROWS = 3
# How often it is grpcio's polling thread.
_POLLING_SHARE = 0.3
# The thread that serves HTTP, whose end ends a process, too.
_HTTP = "http"
_FUNCTION_MODULE = "tensorferry.server.processes.functions.in_child"
_CLOCK_JUMPS = (-7200.0, -5.0, 5.0, 3600.0)


class Faults:
    """Injects faults, each on its own thread, and ends them all.

    `steady` is never ended, so that its memory can be followed; `mortal` is ended again and again. Of
    several processes, some of both servers are killed.
    """

    def __init__(
        self,
        seed: int,
        steady: Server,
        mortal: Server,
        proxy: FaultProxy,
        callers: CallerProcesses,
        repository: Path,
        *,
        clocks: bool,
    ) -> None:
        self._chance = random.Random(seed)
        self._steady, self._mortal = steady, mortal
        self._proxy = proxy
        self._callers = callers
        self._repository = repository
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._healed = threading.Event()
        self._threads: list[threading.Thread] = []
        # The exceptions that were thrown, by thread.
        self.thrown: Counter[str] = Counter()
        self._kinds: list[Callable[[random.Random], None]] = [
            *(
                self.sigterm, self.sigkill, self.kill_callers, self.cut, self.half_close, self.delay,
                self.throttle, self.reset,
            ),
            *([self.throw] * _THROWS),
            *(self.silence, self.starve, self.freeze, self.take_files, self.kill_function, self.reload, self.reload, self.unload),
            *([self.clock] if clocks else []),
            *([self.kill_process] * _KILLS if steady.count > 1 else []),
        ]  # fmt: skip

    def inject(self, seconds: float) -> None:
        """Inject faults for `seconds`; then heal all and return."""
        self._healed.clear()
        until = time.monotonic() + seconds
        # Each kind occurs once before any occurs again.
        hand: list[Callable[[random.Random], None]] = []
        while (left := until - time.monotonic()) > 0:
            if not hand:
                hand = self._chance.sample(self._kinds, len(self._kinds))
            kind = hand.pop()
            chance = random.Random(self._chance.random())
            thread = threading.Thread(target=self._one, args=(kind, chance), name=kind.__name__, daemon=True)
            thread.start()
            self._threads.append(thread)
            self._healed.wait(min(left, self._chance.uniform(*_PAUSE)))
        self._healed.set()
        for thread in self._threads:
            thread.join(180)
            if thread.is_alive():
                self.wrong.append(f"{thread.name} did not end")
        self._threads.clear()
        self._proxy.weather = FAIR

    def _one(self, kind: Callable[[random.Random], None], chance: random.Random) -> None:
        try:
            kind(chance)
            self.done[kind.__name__] += 1
        except BaseException as error:
            self.wrong.append(f"{kind.__name__}: {error!r}")

    def _lasts(self, seconds: float) -> None:
        self._healed.wait(seconds)

    def _end_mortal(self, number: int, chance: random.Random) -> None:
        server = self._mortal
        if server.away.is_set():
            return
        server.away.set()
        try:
            self._start_again(number, 0 if number == signal.SIGTERM else -number, chance)
        finally:
            server.away.clear()

    def _start_again(self, number: int, expected: int, chance: random.Random) -> None:
        server = self._mortal
        code = server.end(number)
        if code != expected:
            self.wrong.append(f"{server.name} ended with {code}, not {expected}")
        self._lasts(chance.uniform(0.0, 2.0))
        server.jump(0.0)
        server.start()

    def sigterm(self, chance: random.Random) -> None:
        """A server drains and ends under load, and is started again."""
        self._end_mortal(signal.SIGTERM, chance)

    def sigkill(self, chance: random.Random) -> None:
        """A server is killed and started again."""
        self._end_mortal(signal.SIGKILL, chance)

    def kill_process(self, chance: random.Random) -> None:
        """One of several processes dies; its connections break. Not by SIGABRT, for which a request would be blamed."""
        children = chance.choice((self._steady, self._mortal)).processes["the server processes"]
        if children:
            # It may have ended meanwhile.
            with suppress(ProcessLookupError):
                os.kill(chance.choice(children), signal.SIGKILL)

    def kill_function(self, chance: random.Random) -> None:
        """A process of the function dies. What ran there runs again in another one."""
        servers = (one for ids in self._steady.processes.values() for one in ids)
        functions = [one for server in servers for one in observed.of_module(server, _FUNCTION_MODULE)]
        if functions:
            # It may have ended meanwhile.
            with suppress(ProcessLookupError):
                os.kill(chance.choice(functions), signal.SIGKILL)

    def throw(self, chance: random.Random) -> None:
        """An exception escapes from a thread that waits for work. If that ends a server, it is started again."""
        server = chance.choice((self._steady, self._mortal))
        children = [one for role, ids in server.processes.items() if role != "the supervisor" for one in ids]
        # It may be frozen, or have ended meanwhile.
        with suppress(OSError):
            process = chance.choice(children)
            names = list(thrower.threads(server.sockets, process))
            chance.shuffle(names)
            if chance.random() < _POLLING_SHARE:
                names.sort(key=lambda name: not name.endswith(thrower.POLLING))
            for name in names:
                ends_server = process == server.pid and (name.endswith(thrower.POLLING) or name == _HTTP)
                if server.away.is_set() or (ends_server and server is self._steady):
                    continue
                if ends_server:
                    server.away.set()
                try:
                    if thrower.throw(server.sockets, process, name, only_waiting=True):
                        self.thrown[re.sub(r"\d+", "N", name)] += 1
                        if ends_server:
                            # No signal: the exception ends it.
                            self._start_again(0, 1, chance)
                        return
                finally:
                    if ends_server:
                        server.away.clear()

    def kill_callers(self, chance: random.Random) -> None:
        """A process of callers is killed during its calls."""
        self._callers.kill_one(chance.randrange(100))

    def cut(self, chance: random.Random) -> None:
        """The network resets every connection."""
        self._proxy.cut()

    def half_close(self, chance: random.Random) -> None:
        """Every connection is closed in one direction."""
        self._proxy.half_close()

    def reset(self, chance: random.Random) -> None:
        """Clients reset their connections at every step of a call."""
        # Sender 0 has no ledger, so no answer is expected.
        message = request("affine", 0, 0, _RESET_ROWS).SerializeToString()
        client = ResettingClient(self._steady.address, message)
        for step in chance.sample(STEPS * _RESETS, len(STEPS) * _RESETS):
            if self._healed.is_set():
                return
            try:
                client.reset_after(step)
            except OSError:
                # The server has no file left for it, or is frozen.
                continue

    def _weather(self, weather: Weather, seconds: float) -> None:
        self._proxy.weather = weather
        self._lasts(seconds)
        self._proxy.weather = FAIR

    def delay(self, chance: random.Random) -> None:
        """Every chunk is delayed."""
        self._weather(Weather(delay=chance.uniform(0.02, 0.4)), chance.uniform(1, 4))

    def throttle(self, chance: random.Random) -> None:
        """The network is throttled."""
        self._weather(Weather(rate=chance.choice([500, 5_000, 50_000])), chance.uniform(1, 4))

    def silence(self, chance: random.Random) -> None:
        """Nothing passes, without an error."""
        self._weather(Weather(silent=True), chance.uniform(0.5, 4))

    def starve(self, chance: random.Random) -> None:
        """Other processes use the processor."""
        busy = Busy(4, self._steady.pid)
        try:
            self._lasts(chance.uniform(1, 3))
        finally:
            busy.close()

    def freeze(self, chance: random.Random) -> None:
        """A server is frozen for a while, or one process of it."""
        every = [process for ids in self._steady.processes.values() for process in ids]
        frozen = every if chance.random() < 0.5 else [chance.choice(every)]
        for process in frozen:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)
        try:
            self._lasts(chance.uniform(0.3, 2.5))
        finally:
            for process in frozen:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)

    def take_files(self, chance: random.Random) -> None:
        """Idle connections take all files of a server, or of each of its processes."""
        files = MOST_FILES * self._steady.count + 50
        exhaust_files(("127.0.0.1", self._steady.port), files, chance.uniform(1, 4), self._healed)

    def clock(self, chance: random.Random) -> None:
        """The wall clocks jump, and back."""
        for server in (self._steady, self._mortal):
            server.jump(chance.choice(_CLOCK_JUMPS))
        self._lasts(chance.uniform(1, 4))
        for server in (self._steady, self._mortal):
            server.jump(0.0)

    def reload(self, chance: random.Random) -> None:
        """Models are replaced by new files with the same content. Living sequences stay with the old model."""
        version = self._repository / "swapped" / "1" / "model.onnx"
        write_model(version.with_suffix(".new")).rename(version)
        write_sums(self._repository / SUMS)
        if self._steady.count > 1:
            # The mortal one may be away.
            os.kill(self._steady.pid, signal.SIGHUP)
            return
        for name in ("swapped", SUMS):
            self._control("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=name))

    def unload(self, chance: random.Random) -> None:
        """A model is unloaded, and loaded again."""
        self._control("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="swapped"))
        self._lasts(chance.uniform(0.1, 1))
        self._control("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="swapped"))

    def _control(self, method: str, request: Any) -> None:
        for server in (self._steady, self._mortal):
            with grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
                stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
                try:
                    getattr(stub, method)(request, timeout=20)
                except grpc.RpcError as error:
                    known: Any = error
                    expected = (
                        grpc.StatusCode.UNAVAILABLE,
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                        grpc.StatusCode.NOT_FOUND,
                        grpc.StatusCode.FAILED_PRECONDITION,
                        grpc.StatusCode.CANCELLED,
                    )
                    if known.code() not in expected:
                        self.wrong.append(f"{method} on {server.name}: {known.code()}, {known.details()}")
