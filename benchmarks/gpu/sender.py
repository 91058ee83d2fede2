"""Load process: takes LoadGen's queries from a socket, sends each to the server, and reports its
answer.

All load processes read from the same end of one socket, so that a free process gets each query. A
record has the query's id, the number of its sample, and the limit of requests in flight; a process
at its limit reads no more. The reply has the id, and whether the answer was right.
"""

from __future__ import annotations

import argparse
import socket
import struct
import sys
import threading
from functools import partial
from typing import Any

from gpu.workloads import SAMPLES, workload_of

METHOD = "/inference.GRPCInferenceService/ModelInfer"
QUERY = struct.Struct("<QII")
ANSWER = struct.Struct("<QB")
PROPER, FAILED, READY = 0, 1, 2
_FIRST_ANSWER_SECONDS = 60


class _Flight:
    """Number of requests in flight, and the wait for it to fall. Thread-safe."""

    def __init__(self) -> None:
        # Guards the count; nothing is sent while it is held.
        self._fewer = threading.Condition()
        self._count = 0

    def enter(self, most: int) -> None:
        with self._fewer:
            while self._count >= most:
                self._fewer.wait()
            self._count += 1

    def end(self) -> None:
        with self._fewer:
            self._count -= 1
            self._fewer.notify()


def main() -> None:
    """Send until the other end of the socket is closed."""
    import grpc

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--socket", type=int, required=True, help="an inherited descriptor")
    parser.add_argument("--address", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    workload = workload_of(arguments.workload, small=arguments.small)
    requests, least = [workload.request(1, number) for number in range(SAMPLES)], workload.answer_bytes
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    link, flight = socket.socket(fileno=arguments.socket), _Flight()
    said: list[str] = []

    def answered(number: int, call: Any) -> None:
        flight.end()
        proper = call.code() is grpc.StatusCode.OK and len(call.result()) >= least
        if not proper and not said:
            said.append(f"{call.code()}: {call.details()}")
            print(said[0], file=sys.stderr, flush=True)
        link.send(ANSWER.pack(number, PROPER if proper else FAILED))

    with grpc.insecure_channel(arguments.address, options) as channel:
        infer: Any = channel.unary_unary(METHOD)
        infer(requests[0], timeout=_FIRST_ANSWER_SECONDS)
        link.send(ANSWER.pack(0, READY))
        while record := link.recv(QUERY.size):
            number, sample, window = QUERY.unpack(record)
            flight.enter(window)
            infer.future(requests[sample]).add_done_callback(partial(answered, number))


if __name__ == "__main__":
    main()
