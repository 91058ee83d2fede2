"""Clients that send requests without a pause, check each answer, and keep what became of each request."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from chaos.content import request, verdict

from tensorferry.protos import inference_pb2_grpc

# Requests that a caller has in flight, and those of one stream.
AT_ONCE = 4
IN_A_STREAM = 20
# Far more than any request takes: one that ends by it was lost.
DEADLINE_SECONDS = 30.0
# Between two bursts, so that the callers leave the processors some time.
PAUSE_SECONDS = 0.004
# After a burst without any answer, as clients that retry do.
FAILED_PAUSE_SECONDS = 0.05
# Each caller has a connection of its own, which it opens again soon after it broke.
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was not answered."""

    address: str
    state: str


class Caller:
    """One connection, used by one thread: bursts of unary calls, or streams.

    Each caller has its own address of the loopback network, so that its connection can be found among the server's.
    """

    def __init__(self, number: int, port: int, *, streams: bool) -> None:
        self.address = f"127.0.0.{10 + number}"
        self.kind = "stream" if streams else "unary"
        self._number = number
        self._target = f"{self.address}:{port}"
        self._requests = itertools.count(1)
        self._stop = threading.Event()
        self._reopen = threading.Event()
        # Written by the thread only, read by others. `answered_at` is when the last burst or stream
        # with a right answer began; it has ended.
        self.sent = 0
        self.states: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self.answered_at = 0.0
        self._answered = False
        self._thread = threading.Thread(target=self._run, name=f"caller-{number}", daemon=True)

    def start(self) -> None:
        """Start to send requests."""
        self._thread.start()

    def stop(self) -> bool:
        """Send no more. Return whether each request has ended."""
        self._stop.set()
        self._thread.join(2 * DEADLINE_SECONDS)
        return not self._thread.is_alive()

    def reopen(self) -> None:
        """Close the connection when no request is in flight, and open another."""
        self._reopen.set()

    def _run(self) -> None:
        send = self._stream if self.kind == "stream" else self._burst
        while not self._stop.is_set():
            self._reopen.clear()
            with grpc.insecure_channel(self._target, OPTIONS) as channel:
                stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
                while not self._stop.is_set() and not self._reopen.is_set():
                    self._answered, began = False, time.monotonic()
                    send(stub)
                    if self._answered:
                        self.answered_at = began
                    time.sleep(PAUSE_SECONDS if self._answered else FAILED_PAUSE_SECONDS)

    def _burst(self, stub: Any) -> None:
        calls = []
        for _ in range(AT_ONCE):
            number, message = self._next()
            calls.append((number, stub.ModelInfer.future(message, timeout=DEADLINE_SECONDS)))
        for number, call in calls:
            try:
                state = verdict(call.result(), self._number, number, 1)
            except grpc.RpcError as error:
                state = error.code().name
            self._ended(state)

    def _stream(self, stub: Any) -> None:
        messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        waiting = set()
        for _ in range(IN_A_STREAM):
            number, message = self._next()
            waiting.add(number)
            messages.put(message)
        messages.put(None)
        end = "NO_ANSWER"
        try:
            for response in stub.ModelStreamInfer(iter(messages.get, None), timeout=DEADLINE_SECONDS):
                inner = response.infer_response
                number = int(inner.id.partition(".")[2] or 0)
                if response.error_message:
                    state = inner.parameters["tensorferry_status"].string_param
                else:
                    state = verdict(inner, self._number, number, 1)
                if number not in waiting:
                    # Or it does not name its request.
                    state = "DOUBLED"
                waiting.discard(number)
                self._ended(state)
        except grpc.RpcError as error:
            end = error.code().name
        for _ in waiting:
            self._ended(end)

    def _next(self) -> tuple[int, Any]:
        number = next(self._requests)
        self.sent += 1
        return number, request("affine", self._number, number, 1)

    def _ended(self, state: str) -> None:
        self.states[state] += 1
        if state == "OK":
            self._answered = True
        else:
            self.failures.append(Failure(self.address, state))


def start(port: int, unary: int, streams: int) -> Sequence[Caller]:
    """Start callers of both kinds."""
    callers = [Caller(number, port, streams=number >= unary) for number in range(unary + streams)]
    for caller in callers:
        caller.start()
    return callers
