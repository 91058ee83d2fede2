"""Callers in closed loops with a ledger: each request is answered once, by its own answer."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType

import grpc
import numpy as np
from support.processes.probe import answer, output, request

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

# Bound for waits that end at once unless something is broken.
PATIENCE = 60.0
IN_A_STREAM = 8
# Between two calls of a caller, so that the callers leave the processors some time.
PAUSE_SECONDS = 0.01


class Traffic:
    """Calls of the probe model from enter to exit; failures are in `failures`.

    Calls are never retried, except the unanswered requests of an open stream whose server has ended
    it.
    """

    def __init__(self, channel: grpc.Channel, *, callers: int = 4) -> None:
        self._stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._tags = itertools.count(1)
        self._over = threading.Event()
        # Guards answered, failures and left.
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self.answered: Counter[str] = Counter()
        self.failures: list[str] = []
        # How often the server of an open stream ended it.
        self.left = 0
        counts = ((self._call, callers), (self._short_stream, 2), (self._session, 1))
        self._ways = [turn.__name__ for turn, _ in counts]
        self._threads = [
            threading.Thread(target=self._loop, args=(turn,), name=turn.__name__)
            for turn, count in counts
            for _ in range(count)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def await_more(self, count: int = 50) -> None:
        """Wait until each kind of call has been answered `count` times more."""
        with self._lock:
            aim = {turn: self.answered[turn] + count for turn in self._ways}
            assert self._progress.wait_for(
                lambda: self.failures or all(self.answered[turn] >= more for turn, more in aim.items()),
                PATIENCE,
            ), f"nothing goes on: {self.answered}"

    def _loop(self, turn: Callable[[], None]) -> None:
        while not self._over.is_set():
            try:
                turn()
                self._over.wait(PAUSE_SECONDS)
            except grpc.RpcError as error:
                self._fail(f"{turn.__name__}: {error.code()}: {error.details()}")
            except Exception as error:
                self._fail(f"{turn.__name__}: {error!r}")

    def _fail(self, what: str) -> None:
        with self._lock:
            self.failures.append(what)
            self._progress.notify_all()

    def _answered(self, turn: str, response: pb.ModelInferResponse, tag: int) -> None:
        assert response.id == str(tag), f"{response.id} is the answer to {tag}"
        np.testing.assert_array_equal(output(response), answer(tag))
        with self._lock:
            self.answered[turn] += 1
            self._progress.notify_all()

    def _call(self) -> None:
        tag = next(self._tags)
        self._answered("_call", self._stub.ModelInfer(request(tag), timeout=PATIENCE), tag)

    def _short_stream(self) -> None:
        """Send some requests, and close the client's side."""
        tags = [next(self._tags) for _ in range(IN_A_STREAM)]
        answers = list(self._stub.ModelStreamInfer(map(request, tags), timeout=PATIENCE))
        assert len(answers) == len(tags), f"{len(answers)} answers to {len(tags)} requests"
        for tag, response in zip(tags, answers, strict=True):
            assert not response.error_message, response.error_message
            self._answered("_short_stream", response.infer_response, tag)

    def _session(self) -> None:
        """Keep a stream open with one request at a time, and open a new one when the server ends it."""
        tag = 0
        while not self._over.is_set():
            messages: queue.SimpleQueue[pb.ModelInferRequest | None] = queue.SimpleQueue()
            responses = self._stub.ModelStreamInfer(iter(messages.get, None), timeout=10 * PATIENCE)
            try:
                while not self._over.is_set():
                    tag = tag or next(self._tags)
                    messages.put(request(tag))
                    response = next(responses)
                    if response.error_message:
                        # Read while the server stopped accepting, and so refused; the end of the
                        # stream follows.
                        status = response.infer_response.parameters["tensorferry_status"].string_param
                        assert status == "UNAVAILABLE", response.error_message
                        next(responses)
                        raise AssertionError("a stream goes on after its server left it")
                    self._answered("_session", response.infer_response, tag)
                    tag = 0
                    self._over.wait(PAUSE_SECONDS)
                messages.put(None)
                assert list(responses) == []
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                # Accepted requests have been answered. This one was not accepted, and is sent on
                # the next stream.
                with self._lock:
                    self.left += 1
            finally:
                messages.put(None)
