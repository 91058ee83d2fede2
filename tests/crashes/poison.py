"""A request that aborts ONNX Runtime among others: what it gets, what the others get, and how many processes it costs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from chaos.content import Mark, request, verdict
from crashes.callers import DEADLINE_SECONDS, OPTIONS
from polling import until

from tensorferry.protos import inference_pb2_grpc

MODEL = "aborting"
AT_ONCE = 16
# Connections for the same inputs at the end, so that each process gets some.
_AGAIN = 8
# Numbers of senders from here on are no callers'.
_FIRST_SENDER = 1000
_POSITION_STEP = 7
# Of a round: the process that ran it first, one that had it at the same time, and two trials if callers' requests ran
# beside the first.
MOST_ENDS = 4
_REFUSED_SECONDS = 60.0


@dataclass(slots=True)
class Poison:
    """What became of the requests of all rounds, by state: OK, a status, or what is wrong with an answer."""

    neighbours: Counter[str] = field(default_factory=Counter)
    # The neighbours, sent again until each has its answer; and the inputs that abort, once they are refused.
    repeated: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    # Ends of processes in each round, and seconds until the inputs were refused.
    ends: list[int] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether only the request that aborts is refused, and few processes ended."""
        return (
            self.neighbours.keys() <= {"OK", "UNAVAILABLE"}
            and self.repeated.keys() == {"OK"}
            and self.again.keys() == {"INTERNAL"}
            and max(self.ends) <= MOST_ENDS
        )


class Round:
    """Client that sends the requests of one round. One of them aborts its process."""

    def __init__(self, port: int, number: int) -> None:
        self._port = port
        self._position = number * _POSITION_STEP % AT_ONCE
        # The same inputs in two rounds would be refused in the second.
        self._sender = _FIRST_SENDER + number

    def run(self, found: Poison) -> None:
        """Send all at once, then each again until it has its answer or is refused."""
        began = time.monotonic()
        states = self._send(range(AT_ONCE))
        states.pop(self._position)
        found.neighbours.update(states)
        until(
            lambda: self._send([self._position]), lambda last: last == ["INTERNAL"], seconds=_REFUSED_SECONDS
        )
        found.refused.append(time.monotonic() - began)
        others = [number for number in range(AT_ONCE) if number != self._position]
        for number in others:
            ask = partial(self._send, [number])
            found.repeated.update(until(ask, lambda last: last != ["UNAVAILABLE"], seconds=_REFUSED_SECONDS))
        for _ in range(_AGAIN):
            found.again.update(self._send([self._position]))

    def _send(self, numbers: Sequence[int]) -> list[str]:
        """Send unary calls over a new connection; return their states."""
        with grpc.insecure_channel(f"127.0.0.2:{self._port}", OPTIONS) as channel:
            stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            calls = [
                (number, stub.ModelInfer.future(self._message(number), timeout=DEADLINE_SECONDS))
                for number in numbers
            ]
            return [self._state(number, call) for number, call in calls]

    def _message(self, number: int) -> Any:
        mark = Mark.ABORT if number == self._position else Mark.NONE
        return request(MODEL, self._sender, number, 1, mark)

    def _state(self, number: int, call: Any) -> str:
        try:
            return verdict(call.result(), self._sender, number, 1)
        except grpc.RpcError as error:
            status: Any = error
            return str(status.code().name)
