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
from tensorferry.client.load.calls import Calls, StreamCalls, UnaryCalls
from tensorferry.client.load.loops import LATE_SECONDS, ClosedLoop, Loop, OpenLoop
from tensorferry.client.load.records import LoadError, Part, Tally, Target

INTERVAL_SECONDS = 1.0
# Time for the last call to begin, and after its deadline in which gRPC ends it.
_MARGIN_SECONDS = LATE_SECONDS + 1.0

Bodies = Mapping[int, Sequence[bytes]]


def main(connection: Connection, target: Target, bodies: Bodies) -> None:
    """Run steps until the command sends None, or ends.

    For each step the command sends a `Part`, gets None when all connections are made, sends the
    start as a time of the monotonic clock, and gets tallies. Failures are sent as LoadError.
    """
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (part := connection.recv()) is not None:
            try:
                with opened(target, part.connections) as calls:
                    connection.send(None)
                    begin = connection.recv()
                    if begin is not None:
                        run(part, calls, bodies, connection, begin, target.timeout + _MARGIN_SECONDS)
            except BrokenPipeError:
                raise
            except grpc.FutureTimeoutError:
                reason = f"no connection to {target.address} within {target.connect_timeout:g} s"
                connection.send(LoadError(reason))
            except (InferenceError, grpc.RpcError, OSError) as error:
                connection.send(LoadError(str(error)))


@contextlib.contextmanager
def opened(target: Target, connections: int) -> Iterator[list[Calls]]:
    """Connect, and yield the calls of each connection; raise grpc.FutureTimeoutError if there is no connection in time."""
    credentials = channel.channel_credentials(target.tls, None)
    # Without retries, which would hide failures.
    options = channel.stream_options(channel.channel_options(channel.DEFAULT_MAX_MESSAGE_BYTES, ()))
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(channel.open_channel(grpc, target.address, credentials, options))
            for _ in range(connections)
        ]
        for made in channels:
            grpc.channel_ready_future(made).result(target.connect_timeout)
        kind = StreamCalls if target.stream else UnaryCalls
        calls: list[Calls] = [kind(made, target.metadata, target.timeout) for made in channels]
        for each in calls:
            stack.callback(each.close)
        yield calls


def run(
    part: Part, calls: Sequence[Calls], bodies: Bodies, connection: Connection, begin: float, patience: float
) -> None:
    """Run one step that begins with the warm-up at `begin`, and send its tallies.

    The last answers may take as long as `patience`, in seconds.
    """
    measured = (begin + part.plan.warmup, begin + part.plan.warmup + part.plan.duration)
    _sleep(begin - time.monotonic())
    loop: ClosedLoop | OpenLoop
    if part.in_flight:
        rows = part.plan.rows
        sent = itertools.islice(itertools.cycle(bodies[rows]), part.requests)
        loop = ClosedLoop(calls, *measured, sent, rows)
        loop.start(part.in_flight)
    else:
        loop = OpenLoop(calls, *measured, bodies)
        work = (part.arrivals(), begin)
        threading.Thread(target=loop.run, args=work, name="sender", daemon=True).start()
    _sleep(loop.begin - time.monotonic())
    # With a duration the last request may be sent before its end.
    for tally in _tallies(loop, _sleep if part.requests is None else loop.wait):
        connection.send(tally)
        _expire(calls)
    loop.wait(patience)
    _expire(calls)
    connection.send(loop.take())


def _tallies(loop: Loop, has_ended: Callable[[float], bool]) -> Iterator[Tally]:
    """Yield a tally each second; the last interval is as long as the others, up to twice as long.

    `has_ended` waits for seconds, and returns whether the load has ended sooner. The thread that
    reads the tallies does nothing else.
    """
    # Not now: without a warm-up, answers came while the first requests were sent.
    since, cpu, waited = loop.begin, _calls_cpu_seconds(), waited_seconds()
    at, ended = loop.begin, False
    while at < loop.end and not ended:
        following = at + INTERVAL_SECONDS
        at = loop.end if following + INTERVAL_SECONDS > loop.end else following
        ended = has_ended(at - time.monotonic())
        tally, before = loop.take(), (since, cpu, waited)
        since, cpu, waited = time.monotonic(), _calls_cpu_seconds(), waited_seconds()
        tally.seconds, tally.cpu = since - before[0], cpu - before[1]
        # Several threads can wait at the same time, and a thread that ended takes its time with it.
        tally.waited = min(tally.seconds, max(0.0, waited - before[2]))
        yield tally


def _expire(calls: Sequence[Calls]) -> None:
    for each in calls:
        each.expire()


def _sleep(seconds: float) -> bool:
    time.sleep(max(0.0, seconds))
    return False


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
