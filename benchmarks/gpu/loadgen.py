"""MLPerf LoadGen's Offline and Server scenarios against a running server, over gRPC.

LoadGen runs in this process. One socket hands each query to a free load process, and returns its
completion. A latency is from the time for which LoadGen scheduled the query to its completion in
this process, both ways through the socket included.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from gpu.cores import Layout, cpu_seconds, end, on_cores
from gpu.sender import ANSWER, PROPER, QUERY, READY
from gpu.workloads import SAMPLES, Workload

_Scenario = Literal["Offline", "Server"]
OFFLINE: _Scenario = "Offline"
SERVER: _Scenario = "Server"
PERCENTILE = 0.99
# More in flight than a process ever has, because LoadGen's Server scenario has no limit.
UNLIMITED = (1 << 32) - 1
_LEAST_QUERIES = 100
_START_SECONDS, _STOP_SECONDS, _STUCK_SECONDS = 90, 5, 60
_BUFFER_BYTES = 1 << 20


class LoadError(Exception):
    """The load could not be run, or its result could not be read."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run by LoadGen: samples per second, latencies in seconds, its verdict; and the
    number of errors.

    `rate` is LoadGen's metric: samples per second for Offline, completed samples per second for
    Server. `busiest` is the share of its core that the busiest load process used, `loadgen` that of
    LoadGen.
    """

    scenario: str
    rate: float
    target: float
    mean: float
    p50: float
    p99: float
    valid: bool
    errors: int
    busiest: float
    loadgen: float
    seconds: float

    def met(self, bound: float) -> bool:
        """Whether the 99th percentile is within the bound, and every query was answered."""
        return self.p99 <= bound and not self.errors


@dataclass(frozen=True, slots=True)
class Summary:
    """Fields of LoadGen's summary."""

    rate: float
    mean: float
    p50: float
    p99: float
    valid: bool


def parse_summary(text: str) -> Summary:
    """Parse the file that LoadGen writes; raise LoadError for a missing figure."""

    def figure(*names: str) -> float:
        for name in names:
            if found := re.search(rf"^{re.escape(name)}\s*:\s*([\d.eE+-]+)\s*$", text, re.MULTILINE):
                return float(found[1])
        raise LoadError(f"LoadGen's summary has no {names[0]!r}: {text!r}")

    verdict = re.search(r"^Result is\s*:\s*(\w+)", text, re.MULTILINE)
    if verdict is None:
        raise LoadError(f"LoadGen's summary has no result: {text!r}")
    return Summary(
        # The first name is Server's, the second Offline's.
        rate=figure("Completed samples per second", "Samples per second"),
        mean=figure("Mean latency (ns)") / 1e9,
        p50=figure("50.00 percentile latency (ns)") / 1e9,
        p99=figure("99.00 percentile latency (ns)") / 1e9,
        valid=verdict[1] == "VALID",
    )


class Load:
    """Load processes connected to a server, with LoadGen in front of them. Not thread-safe."""

    def __init__(self, address: str, workload: Workload, layout: Layout, folder: Path) -> None:
        self._bound = workload.bound
        self._log = folder / f"senders-{address.rpartition(':')[2]}.log"
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end_ in (self._link, theirs):
            end_.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._senders: list[subprocess.Popen[bytes]] = []
        # Queries that LoadGen has issued and that are not complete. Three threads change it, each
        # by one operation of a dict, so it needs no lock.
        self._open: dict[int, object] = {}
        self._errors = self._answers = 0
        self._window = UNLIMITED
        self._broken = ""
        self._collector = threading.Thread(target=self._collect, name="answers")
        words = ["-m", "gpu.sender", "--address", address, "--workload", workload.name]
        if not workload.model.half:
            words.append("--small")
        try:
            with self._log.open("wb") as said:
                for core in layout.senders:
                    with on_cores((core,)):
                        self._senders.append(
                            self._start([*words, "--socket", str(theirs.fileno())], theirs, said)
                        )
            theirs.close()
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._collector.start()

    @staticmethod
    def _start(words: Sequence[str], theirs: socket.socket, said: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            pass_fds=(theirs.fileno(),),
            # Only this process gets Ctrl-C; it then closes the socket.
            start_new_session=True,
        )

    def _wait_until_ready(self) -> None:
        self._link.settimeout(_START_SECONDS)
        for _ in self._senders:
            try:
                record = self._link.recv(ANSWER.size)
            except TimeoutError:
                record = b""
            if not record or ANSWER.unpack(record)[1] != READY:
                raise LoadError(f"a load process did not start: {self._said()}")
        self._link.settimeout(None)

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-1500:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    @property
    def processes(self) -> list[int]:
        """Return the load processes' ids."""
        return [sender.pid for sender in self._senders]

    def close(self) -> None:
        """End the load processes."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        if self._collector.ident is not None:
            self._collector.join()
        self._link.close()
        for sender in self._senders:
            end(sender, _STOP_SECONDS)

    def offline(self, expected: float, seconds: float, in_flight: int) -> Outcome:
        """Run the Offline scenario: all samples of `seconds` at the expected rate, issued at once,
        `in_flight` of them in flight.
        """
        return self._run(OFFLINE, expected, seconds, max(1, in_flight // len(self._senders)))

    def server(self, rate: float, seconds: float) -> Outcome:
        """Run the Server scenario: Poisson arrivals at a rate, each sent at once."""
        return self._run(SERVER, rate, seconds, UNLIMITED)

    def _run(self, scenario: _Scenario, rate: float, seconds: float, window: int) -> Outcome:
        import mlperf_loadgen as loadgen

        settings = loadgen.TestSettings()
        settings.scenario = getattr(loadgen.TestScenario, scenario)
        settings.mode = loadgen.TestMode.PerformanceOnly
        settings.offline_expected_qps = settings.server_target_qps = rate
        settings.server_target_latency_ns = round(self._bound * 1e9)
        settings.server_target_latency_percentile = PERCENTILE
        settings.min_duration_ms = round(seconds * 1e3)
        settings.min_query_count = _LEAST_QUERIES
        self._errors, self._window, self._broken = 0, window, ""
        self._open.clear()
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(ended,), name="watch")
        pids = self.processes
        before, own = [cpu_seconds(pid) for pid in pids], time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            outputs = loadgen.LogOutputSettings()
            outputs.outdir, outputs.copy_summary_to_stdout = folder, False
            logs = loadgen.LogSettings()
            logs.log_output, logs.enable_trace = outputs, False
            system = loadgen.ConstructFastSUT(self._issue, _flush)
            samples = loadgen.ConstructQSL(SAMPLES, SAMPLES, _loaded, _loaded)
            watch.start()
            began = time.monotonic()
            try:
                with self._uninterrupted():
                    loadgen.StartTestWithLogSettings(system, samples, settings, logs)
            finally:
                took = time.monotonic() - began
                ended.set()
                watch.join()
                loadgen.DestroyQSL(samples)
                loadgen.DestroyFastSUT(system)
            text = (Path(folder) / "mlperf_log_summary.txt").read_text()
        if self._broken:
            raise LoadError(f"{self._broken}; the load processes said: {self._said()}")
        used = [cpu_seconds(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
        summary = parse_summary(text)
        return Outcome(
            scenario=scenario,
            rate=summary.rate,
            target=rate,
            mean=summary.mean,
            p50=summary.p50,
            p99=summary.p99,
            valid=summary.valid,
            errors=self._errors,
            busiest=max(used) / took,
            loadgen=(time.process_time() - own) / took,
            seconds=took,
        )

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """LoadGen does not survive an exception during its run. Ctrl-C makes the rest of the run fail,
        and is raised after it.
        """
        interrupted = False

        def note(number: int, frame: object) -> None:
            nonlocal interrupted
            interrupted = True
            self._broken = self._broken or "it was interrupted"

        numbers = (
            (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        )
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if interrupted:
            raise KeyboardInterrupt

    def _issue(self, numbers: Sequence[int], samples: Sequence[int]) -> None:
        """Issue queries for LoadGen; must not raise."""
        for number, sample in zip(numbers, samples, strict=True):
            self._open[number] = None
            try:
                if not self._broken:
                    self._link.send(QUERY.pack(number, sample, self._window))
                    continue
            except OSError as error:
                self._broken = self._broken or f"the load processes take no queries: {error}"
            self._complete(number, proper=False)

    def _collect(self) -> None:
        """Report each answer to LoadGen, until the load processes or this end close the socket."""
        with suppress(OSError):
            while record := self._link.recv(ANSWER.size):
                number, fate = ANSWER.unpack(record)
                self._complete(number, proper=fate == PROPER)

    def _complete(self, number: int, *, proper: bool) -> None:
        import mlperf_loadgen as loadgen

        # The code that removes a query completes it, because LoadGen does not survive a second
        # completion.
        if self._open.pop(number, self) is self:
            return
        self._answers += 1
        if not proper:
            self._errors += 1
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(number, 0, 0)])

    def _watch(self, ended: threading.Event) -> None:
        """Complete each query as an error if no answer comes any more, because LoadGen waits for every
        query.
        """
        answers, since = -1, time.monotonic()
        while not ended.wait(1.0):
            now = time.monotonic()
            if self._answers != answers:
                answers, since = self._answers, now
            dead = [sender.pid for sender in self._senders if sender.poll() is not None]
            stuck = self._open and now > since + _STUCK_SECONDS
            if dead or stuck:
                self._broken = (
                    f"{len(dead)} of the {len(self._senders)} load processes have ended"
                    if dead
                    else f"{len(self._open)} queries have had no answer for {_STUCK_SECONDS} s"
                )
                with suppress(OSError):
                    self._link.shutdown(socket.SHUT_RDWR)
                for number in list(self._open):
                    self._complete(number, proper=False)


def _flush() -> None:
    """Do nothing, because each query is sent at once."""


def _loaded(samples: Sequence[int]) -> None:
    """Do nothing, because each load process has all samples from the start."""
