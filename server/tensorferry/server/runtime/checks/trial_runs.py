"""Limit of the time of each run that the load of a model makes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy.typing as npt

from tensorferry.server.errors import StartError
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

_T = TypeVar("_T")
_Inputs = Mapping[str, npt.NDArray[Any]]

# Time for a load to end after its run was asked to end.
_GRACE_SECONDS = 1.0

# Threads of loads that were given up. Only appended to.
_given_up: list[threading.Thread] = []


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of `what`, which `end` asks to end. It is overdue at the time `due`."""

    what: str
    inputs: _Inputs
    end: Callable[[], None]
    due: float


class _GivenUp(BaseException):
    """The load was given up. No `except Exception`, which takes failed runs for an answer, goes on with it."""


class _TrialRuns:
    """Runs of one load. The thread that loads makes them, and another one looks whether one is overdue."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Written by the thread that loads.
        self.running: _Run | None = None
        # Written by the other thread.
        self._ended = False

    def make(self, run: Callable[[], _T], what: str, inputs: _Inputs, end: Callable[[], None]) -> _T:
        self.running = _Run(what, inputs, end, time.monotonic() + self._seconds)
        try:
            # The load may have been given up since its last run.
            if self._ended:
                raise _GivenUp
            return run()
        finally:
            self.running = None
            if self._ended:
                raise _GivenUp

    def end(self) -> None:
        """Ask the current run to end, and the load with it: no other run begins."""
        self._ended = True
        run = self.running
        if run is not None:
            run.end()


# Runs of the load in this context.
_current: ContextVar[_TrialRuns | None] = ContextVar("trial runs", default=None)


def is_loading() -> bool:
    """Return whether a run that begins is one of a load."""
    return _current.get() is not None


def trial_run(run: Callable[[], _T], what: str, inputs: _Inputs, end: Callable[[], None]) -> _T:
    """Make a run of `what` with these inputs. If it is one of a load, its time is limited; `end` asks it to end."""
    trials = _current.get()
    return run() if trials is None else trials.make(run, what, inputs, end)


def limit_trial_runs(
    model: str,
    seconds: float,
    load: Callable[[], _T],
) -> _T:
    """Return what `load` returns. StartError if a run that it makes takes longer than `seconds` (0: no limit).

    It is called on a thread, because some runs do not end when they are asked to. It stays on its thread. Within
    another load, `load` is called directly, and has the limit of that one.
    """
    if not seconds or _current.get() is not None:
        return load()
    trials = _TrialRuns(seconds)
    loaded: Future[_T] = Future()
    thread = new_thread(
        "load", partial(copy_context().run, _load_into, loaded, trials, load), ThreadKind.EXPENDABLE
    )
    thread.start()
    try:
        left = seconds
        while not wait([loaded], left).done:
            run = trials.running
            # A run that begins meanwhile is not overdue before.
            left = seconds if run is None else run.due - time.monotonic()
            if run is not None and left <= 0:
                trials.end()
                _given_up.append(thread)
                wait([loaded], _GRACE_SECONDS)
                raise _given_up_error(model, seconds, run, hangs=trials.running is run)
        return loaded.result()
    except KeyboardInterrupt:
        # A run that returned while the interpreter shuts down would abort the process.
        trials.end()
        wait([loaded], _GRACE_SECONDS)
        raise
    finally:
        # The traceback of an error holds this frame.
        del loaded


def _load_into(loaded: Future[_T], trials: _TrialRuns, load: Callable[[], _T]) -> None:
    _current.set(trials)
    try:
        loaded.set_result(load())
    except BaseException as error:
        loaded.set_exception(error)
    finally:
        # The traceback holds this frame, too. What the load has made, such as processes, ends with it.
        del loaded


def _given_up_error(model: str, seconds: float, run: _Run, *, hangs: bool) -> StartError:
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in run.inputs.items())
    what = f"model {model!r}: a trial run of {run.what} on {shapes} did not end within {seconds:g} s"
    if hangs:
        _log.critical("%s, and cannot be ended: its thread stays until the process ends", what)
    return StartError(
        f"{what}, the longest run that --run-timeout-seconds allows: correct a loop that does not end, or raise that if a run "
        "takes so long"
    )


def loads_still_run() -> bool:
    """Return whether a load that was given up still runs."""
    return any(thread.is_alive() for thread in _given_up)
