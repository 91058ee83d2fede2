"""One load process: connects, waits for the start of each step, sends, and reports every second."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from tensorferry.client.connection import channel
from tensorferry.client.errors import InferenceError
from tensorferry.client.load.calls import Calls, CallsInTurn, StreamCalls, UnaryCalls
from tensorferry.client.load.histogram import Histogram
from tensorferry.client.load.loops import ClosedLoop, OpenLoop, Recorder
from tensorferry.client.load.records import Failed, Part, Tally, Target

INTERVAL_SECONDS = 1.0
# Time after its deadline in which gRPC ends a call.
_MARGIN_SECONDS = 1.0

Bodies = Mapping[int, Sequence[bytes]]


def main(connection: Connection, target: Target, bodies: Bodies) -> None:
    """Run steps until the command sends None, or ends.

    For each step the command sends a `Part`, gets True when all connections are made, sends the
    start as a time of the monotonic clock, and gets reports. Failures are sent as `Failed`.
    """
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (part := connection.recv()) is not None:
            try:
                with opened(target, part.connections) as calls:
                    connection.send(True)
                    begin = connection.recv()
                    if begin is not None:
                        run(part, calls, bodies, connection, begin, target.timeout + _MARGIN_SECONDS)
            except (InferenceError, grpc.RpcError, grpc.FutureTimeoutError, OSError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                connection.send(Failed(_reason(error, target)))


def _reason(error: Exception, target: Target) -> str:
    if isinstance(error, grpc.FutureTimeoutError):
        return f"no connection to {target.address} within {target.connect_timeout:g} s"
    return str(error)


@contextlib.contextmanager
def opened(target: Target, connections: int) -> Iterator[Calls]:
    """Connect, and yield the calls; raise grpc.FutureTimeoutError if there is no connection in time."""
    credentials = channel.channel_credentials(target.tls, None)
    options = channel.channel_options(channel.DEFAULT_MAX_MESSAGE_BYTES, ())
    # Retries would hide failures.
    options = channel.stream_options(options)
    with contextlib.ExitStack() as stack:
        channels = [channel.opener(grpc)(target.address, credentials, options) for _ in range(connections)]
        for made in channels:
            stack.callback(made.close)
        for made in channels:
            grpc.channel_ready_future(made).result(target.connect_timeout)
        kind = StreamCalls if target.stream else UnaryCalls
        calls = CallsInTurn([kind(made, target.metadata, target.timeout) for made in channels])
        stack.callback(calls.close)
        yield calls


def run(
    part: Part, calls: Calls, bodies: Bodies, connection: Connection, begin: float, patience: float
) -> None:
    """Run one step that begins with the warm-up at `begin`, and send its reports."""
    measured_from = begin + part.plan.warmup
    until = measured_from + part.plan.duration
    recorder = Recorder(measured_from, until)
    reports = _Reports(recorder, connection)
    time.sleep(max(0.0, begin - time.monotonic()))
    if part.in_flight:
        rows = part.plan.rows
        closed = ClosedLoop(
            calls, itertools.islice(itertools.cycle(bodies[rows]), part.requests), rows, recorder
        )
        closed.start(part.in_flight)
        _report_until(reports, calls, measured_from, until, closed.wait)
        closed.stop()
        closed.wait(patience)
    else:
        loop = OpenLoop(calls, bodies, recorder)
        work = (part.arrivals(), begin, until)
        sender = threading.Thread(target=loop.run, args=work, name="sender", daemon=True)
        sender.start()

        def has_ended(seconds: float) -> bool:
            # With a duration the last request may be sent before its end.
            if part.requests is None:
                time.sleep(seconds)
                return False
            sender.join(seconds)
            return not sender.is_alive() and loop.wait(0.0)

        _report_until(reports, calls, measured_from, until, has_ended)
        sender.join()
        loop.wait(patience)
    calls.expire()
    reports.send(0.0)


def _report_until(
    reports: _Reports, calls: Calls, begin: float, end: float, has_ended: Callable[[float], bool]
) -> None:
    """Send a report each second; the last interval is as long as the others, up to twice as long.

    `has_ended` waits for seconds, and returns whether the load has ended sooner.
    """
    _sleep_until(begin)
    reports.reset()
    at, ended = begin, False
    while at < end and not ended:
        following = at + INTERVAL_SECONDS
        at = end if following + INTERVAL_SECONDS > end else following
        ended = has_ended(max(0.0, at - time.monotonic()))
        reports.send(time.monotonic() - reports.since)
        calls.expire()


def _sleep_until(at: float) -> None:
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)


def waited_seconds() -> float:
    """Return how long the threads of this process were ready to run and had no core; 0 where Linux does not say."""
    waited = 0
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                waited += int(Path("/proc/self/task", thread, "schedstat").read_text().split()[1])
    return waited / 1e9


def _calls_cpu_seconds() -> float:
    """Return the processor time of all threads of this process but the calling one, which only reports."""
    return time.process_time() - time.thread_time()


class _Reports:
    """Reports of one step. One thread may use it, and does nothing else."""

    def __init__(self, recorder: Recorder, connection: Connection) -> None:
        self._recorder, self._connection = recorder, connection
        self.since = 0.0
        self._cpu = self._waited = 0.0

    def reset(self) -> None:
        self.since, self._cpu, self._waited = time.monotonic(), _calls_cpu_seconds(), waited_seconds()

    def send(self, seconds: float) -> None:
        """Send the report of an interval; the last one has no seconds."""
        recorded = self._recorder.take()
        latencies, lags = Histogram(), Histogram()
        latencies.add(recorded.latencies)
        lags.add(recorded.lags)
        cpu = _calls_cpu_seconds() - self._cpu if seconds else 0.0
        # Several threads can wait at the same time, and a thread that ended takes its time with it.
        waited = min(seconds, max(0.0, waited_seconds() - self._waited))
        tally = Tally(seconds, latencies, recorded.rows, lags, recorded.failures, cpu, waited)
        self._connection.send(tally)
        self.reset()
