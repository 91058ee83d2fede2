"""Very many Health.Watch calls without a token, beside a good client of a real server.

`PYTHONPATH=tests python -m fuzz.attackers.watches --transport lane` prints the latency of the good
client, and the server's threads and memory before, during and after the calls.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from fuzz.attackers.bombs import Other
from fuzz.attackers.wire import Wire
from support.server.tokens import EVERY, line

from tensorferry.protos.standard import health_pb2

TOKEN = "watches-secret"
# The most calls on each connection.
_CONNECTIONS = 30
_GIVE_UP_SECONDS = 60.0


def watch(address: str, count: int, pipe: Any) -> None:
    """Open this many calls, spread over connections; report their outcomes; cancel them on request."""
    channels = [
        grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(_CONNECTIONS)
    ]
    request = health_pb2.HealthCheckRequest(service="m").SerializeToString()
    calls: list[Any] = []
    for number in range(count):
        start: Any = channels[number % _CONNECTIONS].unary_stream(EVERY["Watch"])
        calls.append(start(request, timeout=_GIVE_UP_SECONDS))
    outcomes: Counter[str] = Counter()
    for call in calls:
        try:
            next(call)
            outcomes["watching"] += 1
        except grpc.RpcError as error:
            status: Any = error
            outcomes[status.code().name] += 1
    pipe.send(dict(outcomes))
    pipe.recv()
    for call in calls:
        call.cancel()
    for channel in channels:
        channel.close()
    pipe.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=("lane", "threaded"), required=True)
    parser.add_argument("--watches", type=int, default=3000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokens"
        path.write_text(line("watches", "infer,control", TOKEN))
        wire = Wire(Path(scratch), given.transport, "--auth-tokens", path, token=TOKEN)
        try:
            _measure(wire, given.watches)
        finally:
            wire.server.stop()


def _measure(wire: Wire, count: int) -> None:
    def report(when: str, other: Other | None = None) -> None:
        figures = wire.figures()
        slowest = (
            ""
            if other is None
            else "p99 {:.1f} ms, slowest {:.1f} ms, ".format(*(1e3 * seconds for seconds in other.over()))
        )
        print(
            f"{when:16s} {slowest}{figures['threads']} threads, {figures['memory_kb'] >> 10} MB, {figures['files']} files",
            flush=True,
        )

    other = Other(wire)
    other.start()
    time.sleep(3)
    report("without", other)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    client = context.Process(target=watch, args=(wire.server.address, count, theirs))
    client.start()
    other = Other(wire)
    other.start()
    print("outcomes of the watches:", ours.recv())
    report("as they come", other)
    other = Other(wire)
    other.start()
    time.sleep(3)
    report("while they watch", other)
    other = Other(wire)
    other.start()
    ours.send(None)
    ours.recv()
    client.join()
    report("as they leave", other)
    for seconds in (1, 5, 15):
        time.sleep(seconds)
        report(f"{seconds} s later")


if __name__ == "__main__":
    main()
