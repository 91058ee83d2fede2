"""App file for tests of child processes: functions that return what they get, and that harm their process."""

from __future__ import annotations

import contextvars
import ctypes
import enum
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tensorferry.batcher import QueueFull
from tensorferry.serving import FP32, STRING, infer, model, pipeline, submit

_X = {"x": FP32[-1]}
_Y = {"y": FP32[-1]}
_COMMAND = {"command": STRING[-1]}


class Nonsense:
    """An object that cannot be sent."""


class Text(str, enum.Enum):  # noqa: UP042 (as many programs have it)
    """Names that are equal to a str, of a class that the server does not have."""

    OTHER = "other"
    LATEST = ""
    X = "x"


class Seconds(float):
    """A number of a class that the server does not have."""


class Untold(Exception):
    """An exception without text."""

    def __str__(self) -> str:
        raise ValueError


@model(inputs=_X, outputs=_Y)
def echo(**tensors: Any) -> Any:
    return tensors


@model(inputs=_X, outputs=_Y, streams=True)
def twice(x: Any) -> Any:
    yield x
    yield x


@model(inputs=_X, outputs=_Y)
def doubled(x: Any) -> Any:
    return x * 2


@model(inputs=_X, outputs=_Y, name="loaded")
class Loaded:
    def load(self) -> None:
        self.factor = 3

    def __call__(self, x: Any) -> Any:
        return x * self.factor


@model(inputs=_X, outputs=_Y, name="previous")
class Previous:
    """It returns the inputs of the run before."""

    def load(self) -> None:
        self.kept: Any = np.zeros(1, np.float32)

    def __call__(self, x: Any) -> Any:
        returned, self.kept = self.kept, x
        return returned


@model(inputs=_X, outputs=_Y, name="broken")
class Broken:
    def load(self) -> None:
        raise OSError("no weights")

    def __call__(self, x: Any) -> Any: ...


@model(inputs=_X, outputs=_Y, name="parameters")
def wrong_parameters(a: Any, b: Any) -> Any: ...


@model(inputs=_COMMAND, outputs=_Y)
def act(command: Any) -> Any:
    """Do what the longest row says."""
    name, _, rest = max(command, key=len).partition(" ")
    match name:
        case "return":
            return RESULTS[rest]
        case "print":
            print(rest, flush=True)
        case "raise":
            raise ValueError(rest)
        case "untold":
            raise Untold
        case "exhaust":
            raise MemoryError("too much")
        case "sys.exit":
            sys.exit(int(rest))
        case "os._exit":
            os._exit(int(rest))
        case "kill":
            os.kill(os.getpid(), int(rest))
        case "kill_once":
            if not os.path.exists(rest):
                Path(rest).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "close_files":
            # Its sockets have the numbers that they have in the process of the tests, which may have hundreds of files.
            os.closerange(3, 1 << 16)
            threading.Event().wait()
        case "fork_and_exit":
            # The child of the child keeps the socket open.
            if os.fork():
                os._exit(5)
            signal.pause()
        case "hang":
            Path(rest).touch()
            threading.Event().wait()
        case "hang_in_native_code":
            Path(rest).touch()
            re.match("(a+)+$", "a" * 60 + "b")
    return np.full(len(command), os.getpid())


RESULTS: dict[str, Any] = {"nothing": None, "an object": {"y": [Nonsense()]}, "a key": {1: 2}, "a cycle": []}
RESULTS["a cycle"].append(RESULTS["a cycle"])


@model(inputs=_X, outputs=_Y)
def nested(x: Any) -> Any:
    """Call another model."""
    return infer("other", x=x, timeout=5.0)


@model(inputs=_X, outputs=_Y)
def many(x: Any) -> Any:
    """Submit many large calls before any answer is read."""
    large = np.ones(200_000)
    futures = [submit("other", x=large * number) for number in range(40)]
    return np.array([future.result()["y"][0] for future in futures])


@model(inputs=_X, outputs=_Y)
def caught(x: Any) -> Any:
    """Return what a call raised."""
    try:
        infer("other", x=x)
    except Exception as error:
        attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
        return [type(error).__module__, type(error).__name__, str(error), list(attributes.items())]


@model(inputs=_X, outputs=_Y)
def abandoned(x: Any) -> Any:
    """Return while a call has no answer. Say what becomes of the call of the run before."""
    if LEFT:
        assert str(LEFT.pop().exception(10.0)) == "the function returned before the call was answered"
    LEFT.append(submit("other", x=x))
    return x


LEFT: list[Any] = []


# Calls by mistake.
WRONG: dict[str, Callable[[Any], Any]] = {
    "a function as name": lambda x: submit(lambda: 0, x=x),  # type: ignore[arg-type]
    "a number as version": lambda x: submit("other", x=x, version=1),  # type: ignore[arg-type]
    "a text as timeout": lambda x: submit("other", x=x, timeout="5"),  # type: ignore[arg-type]
    "nan as timeout": lambda x: submit("other", x=x, timeout=float("nan")),
    "an array for the inputs": lambda x: submit("other", x),
    "a number as input name": lambda x: submit("other", {1: x}),  # type: ignore[dict-item]
    "a function as input": lambda x: infer("other", x=lambda: 0),  # type: ignore[arg-type]
    "functions as elements": lambda x: infer("other", x=np.array([lambda: 0], object)),
    "fields": lambda x: infer("other", x=np.zeros(1, [("a", np.dtype("f4", metadata={"a": Nonsense()}))])),
    "a cycle": lambda x: infer("other", x=RESULTS["a cycle"]),
}


@model(inputs=_X, outputs=_Y)
def mistaken(x: Any) -> Any:
    """Return what calls by mistake raise, and the answer of one that is right."""
    raised = {}
    for what, call in WRONG.items():
        try:
            call(x)
        except Exception as error:
            raised[what] = f"{type(error).__name__}: {error}"
    marked = x.astype(np.dtype(x.dtype, metadata={"a": Nonsense()}))
    right = infer(Text.OTHER, {Text.X: marked}, version=Text.LATEST, timeout=Seconds(5))
    return {**raised, "right": right["y"]}


@model(inputs=_X, outputs=_Y)
def unpicklable(x: Any) -> Any:
    """Raise an exception that the function gets for a call, with objects that cannot be sent."""
    error = QueueFull("full", 0.5)
    error.name, error.text, error.object = Text.OTHER, Seconds(1), lambda: 0  # type: ignore[attr-defined]
    raise error


@model(inputs=_X, outputs=_Y)
def late(x: Any) -> Any:
    """Return what a thread of the last run got for a call after that run."""
    found = LATE.pop()() if LATE else []
    called: list[str] = []
    over = threading.Event()

    def call() -> None:
        over.wait()
        try:
            infer("other", x=x)
        except Exception as error:
            called.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=contextvars.copy_context().run, args=(call,))
    thread.start()

    def result() -> list[str]:
        over.set()
        thread.join()
        return called

    LATE.append(result)
    infer("other", x=x)
    return found


LATE: list[Callable[[], list[str]]] = []


@model(inputs=_X, outputs=_Y, name="step")
def _only_a_step(x: Any) -> Any:
    return x + 1


both = pipeline("both", doubled, _only_a_step)
