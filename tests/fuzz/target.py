"""Fuzz targets: a target takes any bytes and returns the outcome, or raises for what must never
happen.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message

from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.status import status_of

# Longest time of one input, and longest wait for a completion. Far above what any input takes, even
# on a busy machine.
BOUND_SECONDS = 60.0

# Outcome of an input that is answered like a good one.
ANSWERED = "OK"


class Shape(NamedTuple):
    """Structure of an input: leading bytes, and the type of the message behind them, None for no
    message.
    """

    front: bytes
    kind: type[Message] | None


class Target:
    """A fuzz target over any bytes. Used by one thread: `run` any number of times, then `check`, then `close`."""

    name = ""
    # Strings of a message are chosen from these and from hostile ones.
    words: Sequence[str] = ()

    def seeds(self) -> Sequence[bytes]:
        """Return good inputs of every kind, and some that are nearly good."""
        raise NotImplementedError

    def shape(self, data: bytes) -> Shape:
        """Return the structure of these bytes, for mutation."""
        raise NotImplementedError

    def changed(self, random: Random, data: bytes) -> bytes | None:
        """Return an input without a message with a part of it changed, None if it has no parts."""
        return None

    def run(self, data: bytes) -> str:
        """Return the outcome of the input: the name of a status code. Raise AssertionError for
        anything forbidden.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Check that nothing is left of all inputs."""

    def close(self) -> None:
        """End what the target started."""


class FindingError(AssertionError):
    """An input had a forbidden effect."""


def code_of(error: BaseException) -> str:
    """Return the status name of a failure; raise FindingError for INTERNAL."""
    status = status_of(error)
    if status.code is grpc.StatusCode.INTERNAL:
        raise FindingError(f"answered with INTERNAL: {status.message}") from error
    if not status.message:
        raise FindingError(f"{status.code.name} says nothing") from error
    # The text must be valid in a trailer.
    status.message.encode(errors="replace")
    return status.code.name


class Asked:
    """A completion that is waited for; `answers` counts every call of it."""

    __slots__ = ("_answers", "_done", "reply")

    def __init__(self, answers: list[int]) -> None:
        self.reply: InferenceReply | None = None
        self._answers = answers
        self._done = threading.Lock()
        self._done.acquire()

    def __call__(self, reply: InferenceReply) -> None:
        self._answers[0] += 1
        if self.reply is not None:
            raise FindingError("a request was completed twice")
        self.reply = reply
        self._done.release()

    def wait(self) -> InferenceReply:
        if not self._done.acquire(timeout=BOUND_SECONDS):
            raise FindingError(f"no answer within {BOUND_SECONDS:g} s")
        assert self.reply is not None
        return self.reply


class Counted:
    """Calls services, and checks that each request has exactly one completion."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = [0]

    def ask(self, service: InferenceService, data: bytes, metadata: Any = ()) -> Asked:
        asked = Asked(self.answers)
        self.asked += 1
        service.submit(data, math.inf, asked, metadata)
        return asked

    def check(self) -> None:
        if self.answers[0] != self.asked:
            raise FindingError(f"{self.asked} requests had {self.answers[0]} completions")


class Refused(Exception):
    """A method of the servicer ended its call with a status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code


class Context:
    """The part of grpc's context that the servicer's methods use."""

    def __init__(self) -> None:
        self.trailers: Any = ()

    def set_trailing_metadata(self, trailers: Any) -> None:
        self.trailers = trailers

    def abort(self, code: grpc.StatusCode, message: str) -> None:
        if code is grpc.StatusCode.INTERNAL:
            raise FindingError(f"answered with INTERNAL: {message}")
        raise Refused(code, message)


@contextlib.contextmanager
def timed() -> Iterator[None]:
    """Raise FindingError for a block that takes longer than any input may."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    if took > BOUND_SECONDS:
        raise FindingError(f"the input took {took:.1f} s, at most {BOUND_SECONDS:g} are allowed")


class Errors(logging.Handler):
    """Collects the server's error log lines: no input may cause one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # A failed load on a client's request is logged for the operator.
        if "cannot be loaded" not in record.msg:
            self.lines.append(record.getMessage())

    def check(self) -> None:
        """Raise FindingError if there is any."""
        if self.lines:
            raise FindingError(f"logged as an error: {self.lines[:3]}")
