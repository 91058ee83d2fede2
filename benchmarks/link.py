"""Cost of the link between a front-end process and the engine, per request.

    python benchmarks/link.py [--seconds 1] [--rounds 5]

The first table has both sides in one thread of one process: what each side does for a request and its response, in
microseconds, for messages and responses of the same size, in bursts of 1 and 32. The second table has a front-end and
an engine in two processes, each on a core of its own where there are two: round trips in a second with a fixed number
of requests in flight. Values are medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import subprocess
import sys
import time

from tensorferry.server.link import EngineLink, FrontEndLink, LinkFiles, create_link
from tensorferry.server.malloc import reuse_large_buffers

SIZES = (100, 150_000)
BURSTS = (1, 32)
IN_FLIGHT = (1, 32, 256)
NO_ROOM = (8, b"no room")
STEPS = ("submit, flush", "take", "respond, flush", "receive")


def step_seconds(size: int, burst: int, seconds: float) -> list[float]:
    """Return seconds per request of each of STEPS, with bursts of `burst` requests for about `seconds`."""
    files = create_link()
    front_end, engine = FrontEndLink(files.duplicate()), EngineLink(files, no_room=NO_ROOM)
    message = bytes(size)
    pieces = (message,)
    clock = time.perf_counter
    spent = [0.0] * len(STEPS)
    requests = 0
    end = clock() + seconds
    while True:
        started = clock()
        for _ in range(burst):
            front_end.submit(message)
        front_end.flush()
        submitted = clock()
        requests_taken = engine.take().submitted
        taken = clock()
        for ticket, *_ in requests_taken:
            engine.respond(ticket, 0, pieces)
        engine.flush()
        responded = clock()
        responses = front_end.receive()
        received = clock()
        assert len(responses) == burst
        spent[0] += submitted - started
        spent[1] += taken - submitted
        spent[2] += responded - taken
        spent[3] += received - responded
        requests += burst
        if received > end:
            break
    del requests_taken
    engine.close()
    front_end.release()
    return [value / requests for value in spent]


def round_trips(size: int, in_flight: int, seconds: float) -> float:
    """Return round trips in a second with an engine in another process."""
    files = create_link()
    cores = sorted(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, __file__, "--engine", str(size), str(cores[-1]), *map(str, files)], pass_fds=files
    ) as process:
        try:
            os.sched_setaffinity(0, cores[:1])
            return _rate(FrontEndLink(files), bytes(size), in_flight, seconds)
        finally:
            os.sched_setaffinity(0, cores)
            process.kill()


def _rate(front_end: FrontEndLink, message: bytes, in_flight: int, seconds: float) -> float:
    for _ in range(in_flight):
        front_end.submit(message)
    front_end.flush()
    done, started = 0, 0.0
    while True:
        responses = front_end.receive()
        now = time.perf_counter()
        # The clock starts with the first response, when the other process runs.
        started = started or now
        if now > started + seconds:
            break
        done += len(responses)
        for _ in responses:
            front_end.submit(message)
        front_end.flush()
    front_end.release()
    return done / (now - started)


def run_engine(size: int, core: int, files: LinkFiles) -> None:
    """Answer every request, until this process is killed."""
    os.sched_setaffinity(0, [core])
    engine = EngineLink(files, no_room=NO_ROOM)
    pieces = (bytes(size),)
    poll = select.poll()
    poll.register(engine.fileno(), select.POLLIN)
    while True:
        poll.poll()
        for ticket, *_ in engine.take().submitted:
            engine.respond(ticket, 0, pieces)
        engine.flush()


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each value")
    parser.add_argument("--engine", nargs=5, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    reuse_large_buffers()
    if arguments.engine is not None:
        size, core, *files = arguments.engine
        run_engine(size, core, LinkFiles(*files))
        return
    print("microseconds per request, one process")
    print(f"{'bytes':>9} {'burst':>6}  " + "  ".join(f"{step:>14}" for step in STEPS))
    for size in SIZES:
        for burst in BURSTS:
            rounds = [step_seconds(size, burst, arguments.seconds) for _ in range(arguments.rounds)]
            medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
            print(f"{size:9,} {burst:6}  " + "  ".join(f"{value * 1e6:14.2f}" for value in medians))
    print("\nround trips per second, two processes")
    print(f"{'bytes':>9} {'in flight':>9}  {'per second':>12}")
    for size in SIZES:
        for in_flight in IN_FLIGHT:
            rates = [round_trips(size, in_flight, arguments.seconds) for _ in range(arguments.rounds)]
            print(f"{size:9,} {in_flight:9}  {statistics.median(rates):12,.0f}")


if __name__ == "__main__":
    main()
