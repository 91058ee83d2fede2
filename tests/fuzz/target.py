"""What is fuzzed: a target takes any bytes and says what became of them, or raises for what must never happen."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import grpc
from google.protobuf.message import Message

from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.status import status_of

# Longest that one input may take, and that a completion is waited for. Far above what any takes, also on a
# machine that does other things; what hangs never ends.
BOUND_SECONDS = 60.0

# Said of an input that was answered as a good one is.
ANSWERED = "OK"


class Shape(NamedTuple):
    """How an input is built: the bytes in front, and the kind of the message behind them, None for no message."""

    front: bytes
    kind: type[Message] | None


class Target(Protocol):
    """One thing that is fuzzed. Used by one thread; `run` any number of times, then `check`, then `close`."""

    name: str
    # What strings of a message are chosen from, beside hostile ones.
    words: Sequence[str]

    def seeds(self) -> Sequence[bytes]:
        """Good inputs of every kind, and some that are nearly good."""

    def shape(self, data: bytes) -> Shape:
        """How these bytes are read, for those who change them with regard to that."""

    def run(self, data: bytes) -> str:
        """What became of the input: the name of a status code. AssertionError for what must not be."""

    def check(self) -> None:
        """Holds that nothing is left of all that was run."""

    def close(self) -> None:
        """Ends what the target began."""


class FindingError(AssertionError):
    """An input did what none may do."""


def code_of(error: BaseException) -> str:
    """The name of the status of a failure. FindingError if it is INTERNAL, be it by the table or by a bug."""
    status = status_of(error)
    if status.code is grpc.StatusCode.INTERNAL:
        raise FindingError(f"answered with INTERNAL: {status.message}") from error
    if not status.message:
        raise FindingError(f"{status.code.name} says nothing") from error
    # It must travel in a trailer.
    status.message.encode(errors="replace")
    return status.code.name


class Asked:
    """A completion that is waited for; every one there ever was is counted in `answers`."""

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
    """Asks services, and knows that each request had exactly one completion."""

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
    """As much of grpc's context as the servicer's methods use."""

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
    """FindingError for what takes longer than any input may."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    if took > BOUND_SECONDS:
        raise FindingError(f"the input took {took:.1f} s, at most {BOUND_SECONDS:g} are allowed")


class Errors(logging.Handler):
    """Keeps what the server logs as an error: no input may lead to it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # That a model which somebody asked for cannot be loaded is for the operator to know.
        if "cannot be loaded" not in record.msg:
            self.lines.append(record.getMessage())

    def check(self) -> None:
        """FindingError if there is any."""
        if self.lines:
            raise FindingError(f"logged as an error: {self.lines[:3]}")
