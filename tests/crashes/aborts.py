"""One request among many makes ONNX Runtime abort the engine: what that request gets, and what the others get."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from chaos.content import Mark, request, verdict
from crashes.callers import DEADLINE_SECONDS, OPTIONS
from polling import until

from tensorferry.protos import inference_pb2_grpc
from tensorferry.protos.standard import health_pb2

MODEL = "aborting"
AT_ONCE = 32
# Every position has its turn, because both numbers have no common divisor.
_POSITION_STEP = 7
# Number of the sender, which no caller has.
_SENDER = 1000
_WATCH = "/grpc.health.v1.Health/Watch"
_SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass(slots=True)
class Aborts:
    """What became of the requests of all rounds, by state: OK, a status, or what is wrong with an answer."""

    neighbours: Counter[str] = field(default_factory=Counter)
    aborting: Counter[str] = field(default_factory=Counter)
    # The same bytes, sent again once the server was ready.
    again: Counter[str] = field(default_factory=Counter)
    # Seconds in which the server reported NOT_SERVING, in each round.
    not_ready: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, states: Mapping[int, Sequence[str]], position: int) -> None:
        """Record the states of a round's requests by their number; each has one."""
        for number, found in sorted(states.items()):
            if len(found) != 1:
                self.wrong.append(f"request {number} ended {len(found)} times: {found}")
        ordered = [found[0] for _, found in sorted(states.items()) if found]
        self.aborting[ordered.pop(position)] += 1
        self.neighbours.update(ordered)


class Aborter:
    """A client of its own that sends the requests, and another that watches the server's health."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.2:{port}", OPTIONS)
        self._stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._sent = 0
        self._rounds = 0
        # When the server's health changed, and whether it was ready from then on. Appended by the thread only.
        self._health: list[tuple[float, bool]] = []
        self._watched: Any = self._channel.unary_stream(
            _WATCH,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest())
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)
        self._thread.start()
        until(lambda: self._health)

    def round(self, aborts: Aborts) -> bytes:
        """Send requests at once, as unary calls and as a stream in turn. One of them aborts the engine.

        Return the bytes of that one, when the server is ready again.
        """
        position = self._rounds * _POSITION_STEP % AT_ONCE
        send = self._stream if self._rounds % 2 else self._unary
        self._rounds += 1
        messages = [self._message(aborts=index == position) for index in range(AT_ONCE)]
        begin = time.monotonic()
        states = send(messages)
        aborts.add(states, position)
        aborts.not_ready.append(self.not_ready_since(begin))
        return bytes(messages[position].SerializeToString())

    def again(self, message: bytes) -> str:
        """Send a request's bytes again, and return its state."""
        call: Any = self._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        try:
            call(message, timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            status: Any = error
            return str(status.code().name)
        return "OK"

    def not_ready_since(self, begin: float) -> float:
        """Wait until the server is ready again. Return how long it has not been since then."""
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

    def _message(self, *, aborts: bool) -> Any:
        self._sent += 1
        return request(MODEL, _SENDER, self._sent, 1, Mark.ABORT if aborts else Mark.NONE)

    def _unary(self, messages: Sequence[Any]) -> dict[int, list[str]]:
        calls = [
            (_number(message.id), self._stub.ModelInfer.future(message, timeout=DEADLINE_SECONDS))
            for message in messages
        ]
        states: dict[int, list[str]] = {}
        for number, call in calls:
            try:
                state = verdict(call.result(), _SENDER, number, 1)
            except grpc.RpcError as error:
                status: Any = error
                state = status.code().name
            states[number] = [state]
        return states

    def _stream(self, messages: Sequence[Any]) -> dict[int, list[str]]:
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for message in (*messages, None):
            waiting.put(message)
        states: dict[int, list[str]] = {_number(message.id): [] for message in messages}
        end = "NO_ANSWER"
        try:
            for response in self._stub.ModelStreamInfer(iter(waiting.get, None), timeout=DEADLINE_SECONDS):
                inner = response.infer_response
                number = _number(inner.id)
                if response.error_message:
                    state = inner.parameters["tensorferry_status"].string_param
                else:
                    state = verdict(inner, _SENDER, number, 1)
                states.setdefault(number, []).append(state)
        except grpc.RpcError as error:
            status: Any = error
            end = status.code().name
        for found in states.values():
            if not found:
                found.append(end)
        return states

    def _watch(self) -> None:
        try:
            for response in self._watched:
                self._health.append((time.monotonic(), response.status == _SERVING))
        except grpc.RpcError:
            # It was cancelled, or the server has ended.
            return


def _number(request_id: str) -> int:
    return int(request_id.partition(".")[2] or 0)
