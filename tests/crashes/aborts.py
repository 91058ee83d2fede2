"""One request among many makes ONNX Runtime abort the engine: what that request gets, and what the others get."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from chaos.content import Mark, request, verdict
from crashes.callers import DEADLINE_SECONDS, OPTIONS
from grpc_health.v1 import health_pb2, health_pb2_grpc
from polling import until

from tensorferry.protos import inference_pb2_grpc

MODEL = "aborting"
AT_ONCE = 32
# Every position has its turn, because both numbers have no common divisor.
_POSITION_STEP = 7
# Numbers of senders from here on are no callers'.
_FIRST_SENDER = 1000
# What became of each request, by its number.
_States: TypeAlias = dict[int, list[str]]
_SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass(slots=True)
class Aborts:
    """What became of the requests of all rounds, by state: OK, a status, or what is wrong with an answer."""

    neighbours: Counter[str] = field(default_factory=Counter)
    aborting: Counter[str] = field(default_factory=Counter)
    # The same bytes, sent again once all had ended.
    again: Counter[str] = field(default_factory=Counter)
    # Seconds in which the server reported NOT_SERVING, and until all had ended, in each round.
    not_ready: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether the others got their answers, and only the request that aborts the engine is blamed."""
        blamed = self.aborting.keys() | self.again.keys()
        return self.neighbours.keys() == {"OK"} and blamed == {"INTERNAL"} and not self.wrong

    def add(self, states: Mapping[int, Sequence[str]], position: int) -> None:
        """Record the states of a round's requests by their number; each has one."""
        for number, found in sorted(states.items()):
            if len(found) != 1:
                self.wrong.append(f"request {number} ended {len(found)} times: {found}")
        ordered = [found[0] for _, found in sorted(states.items()) if found]
        self.aborting[ordered.pop(position)] += 1
        self.neighbours.update(ordered)


class Aborter:
    """Client that sends the requests of one round, and watches the server's health.

    Odd rounds send a stream, even ones unary calls. The position of the request that aborts differs from round to round.
    """

    def __init__(self, port: int, number: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.2:{port}", OPTIONS)
        self._stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._send = self._stream if number % 2 else self._unary
        self._position = number * _POSITION_STEP % AT_ONCE
        # The same bytes in two rounds would be refused in the second.
        self._sender = _FIRST_SENDER + number
        # When the server's health changed, and whether it was ready from then on. Appended by the thread only.
        self._health: list[tuple[float, bool]] = []
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._check_health = health.Check
        self._watched = health.Watch(health_pb2.HealthCheckRequest())
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)
        self._thread.start()
        until(lambda: self._health)

    def run(self, aborts: Aborts, engine: int) -> None:
        """Send requests at once. One of them aborts the engine, and is sent again once the server is ready."""
        messages = [
            request(MODEL, self._sender, number, 1, Mark.ABORT if number == self._position else Mark.NONE)
            for number in range(AT_ONCE)
        ]
        # Frozen until the front-end has them all, so that they share a batch.
        os.kill(engine, signal.SIGSTOP)
        states_of = self._send(messages)
        self._check_health(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        begin = time.monotonic()
        os.kill(engine, signal.SIGCONT)
        states = states_of()
        aborts.ended.append(time.monotonic() - begin)
        aborts.add(states, self._position)
        aborts.not_ready.append(self._not_ready_since(begin))
        again = self._unary([messages[self._position]])()
        aborts.again.update(state for found in again.values() for state in found)

    def _not_ready_since(self, begin: float) -> float:
        until(
            lambda: [ready for at, ready in self._health if at >= begin],
            lambda found: False in found and found[-1],
            seconds=2 * DEADLINE_SECONDS,
        )
        changes = [change for change in self._health if change[0] >= begin]
        found = 0.0
        for (at, ready), (following, _) in itertools.pairwise(changes):
            found += 0.0 if ready else following - at
        return found

    def close(self) -> None:
        """End both."""
        self._watched.cancel()
        self._thread.join()
        self._channel.close()

    def _unary(self, messages: Sequence[Any]) -> Callable[[], _States]:
        """Send unary calls. The result waits for their states."""
        calls = [
            (_number(message.id), self._stub.ModelInfer.future(message, timeout=DEADLINE_SECONDS))
            for message in messages
        ]

        def states_of() -> _States:
            states: _States = {}
            for number, call in calls:
                try:
                    state = verdict(call.result(), self._sender, number, 1)
                except grpc.RpcError as error:
                    status: Any = error
                    state = status.code().name
                states[number] = [state]
            return states

        return states_of

    def _stream(self, messages: Sequence[Any]) -> Callable[[], _States]:
        """Send a stream. The result waits for the states of its requests."""
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for message in (*messages, None):
            waiting.put(message)
        call = self._stub.ModelStreamInfer(iter(waiting.get, None), timeout=DEADLINE_SECONDS)

        def states_of() -> _States:
            states: _States = {_number(message.id): [] for message in messages}
            end = "NO_ANSWER"
            try:
                for response in call:
                    inner = response.infer_response
                    number = _number(inner.id)
                    if response.error_message:
                        state = inner.parameters["tensorferry_status"].string_param
                    else:
                        state = verdict(inner, self._sender, number, 1)
                    states.setdefault(number, []).append(state)
            except grpc.RpcError as error:
                status: Any = error
                end = status.code().name
            for found in states.values():
                if not found:
                    found.append(end)
            return states

        return states_of

    def _watch(self) -> None:
        try:
            for response in self._watched:
                self._health.append((time.monotonic(), response.status == _SERVING))
        except grpc.RpcError:
            # It was cancelled, or the server has ended.
            return


def _number(request_id: str) -> int:
    return int(request_id.partition(".")[2] or 0)
