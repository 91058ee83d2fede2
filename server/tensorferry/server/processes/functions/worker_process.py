"""Python function of an app file in a child process, which is started again after its death."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.processes.child import ChildEnded, ExitStatus, RestartDelay
from tensorferry.server.processes.functions.arrays import Array
from tensorferry.server.processes.functions.errors import ProcessDied, ProcessNotStarted, RequestRefused
from tensorferry.server.processes.functions.function_child import FunctionChild
from tensorferry.server.processes.functions.values import digest_of_inputs
from tensorferry.server.processes.suspect_requests import REFUSED, REFUSED_SECONDS, RefusedRequests
from tensorferry.server.python.functions.answers import NO_MORE, Answers
from tensorferry.server.python.functions.call import requests_of

_log = logging.getLogger("tensorferry.server")

# How long `close` waits for a run, and then for the process.
_CLOSE_SECONDS = 1.0
_KILLED = ExitStatus.of(-signal.SIGKILL)


class WorkerProcess:
    """A child process that runs the function `model` of the file `app`. One thread at a time may call `run` and `start`.

    `name` is for the log. `refused` remembers requests that ended a process; the processes of a model share one.
    `end_runs`, `allow_runs` and `close` are thread-safe. No process runs before `start` or the first `run`.
    """

    def __init__(self, app: Path, model: str, *, name: str, refused: RefusedRequests | None = None) -> None:
        self._app = app
        self._model = model
        self._name = name
        self._refused = RefusedRequests() if refused is None else refused
        self._on_death: Callable[[], None] = lambda: None
        # Held during a start and a run. Guards the fields below it, up to the next lock.
        self._busy = threading.Lock()
        self._starts = 0
        self._delay = RestartDelay()
        # The time from which a start may be tried, and why the last one failed.
        self._start_at = 0.0
        self._failure = ""
        # Guards writes of _child, _ending and _closed. Nothing is waited for while it is held.
        self._lock = threading.Lock()
        self._child: FunctionChild | None = None
        self._ending = False
        self._closed = False

    def on_death(self, count: Callable[[], None]) -> None:
        """Set the function to call when a started process has ended and the server did not end it."""
        self._on_death = count

    @property
    def pid(self) -> int | None:
        """The id of the process; None if there is none."""
        child = self._child
        return None if child is None else child.pid

    @property
    def restarts(self) -> int:
        """Number of starts after the first."""
        return max(0, self._starts - 1)

    def start(self) -> None:
        """Start the process, if there is none, and wait until it has loaded the function.

        ProcessNotStarted if it cannot, or not yet again. ProcessDied after `end_runs` or `close`.
        """
        with self._busy:
            self._running_child()

    def run(self, inputs: Mapping[str, Array], rows: Sequence[int] = ()) -> Any:
        """Run the function on a batch, and return what it returned.

        `rows` are the rows of each request of the batch, in their order; empty for one request. For a function of one row,
        the result is a list with what it returned for each. Arrays are copies. Calls of other models by the function go
        through the `ModelCaller` of this thread's context (`calls_through`).

        Raises FunctionRaised; ServerError, BatcherError or MemoryError if the function did; ProcessDied; ProcessNotStarted;
        or RequestRefused, if equal inputs of a request have ended a process lately. After ProcessDied the next run starts
        another process. A batch that had not begun when its process ended runs once more. So does a lone request whose
        process got SIGKILL, which the system sends when memory is short.
        """
        return self._exchange(inputs, rows, lambda child: child.run(inputs))

    def answers(self, inputs: Mapping[str, Array]) -> Answers:
        """Return the answers to one request, of a function that yields. Reading them raises as `run` does."""
        return _ProcessAnswers(inputs, partial(self._exchange, inputs, ()))

    def _exchange(
        self,
        inputs: Mapping[str, Array],
        rows: Sequence[int],
        exchange: Callable[[FunctionChild], Any],
        *,
        repeatable: bool = True,
    ) -> Any:
        """Return what `exchange` returns with the process. `repeatable` is whether the batch may run once more.

        A batch that has given an answer may not. It is not refused either.
        """
        again = not repeatable
        with self._busy:
            if repeatable:
                self._check_refused(inputs, rows)
            while True:
                child = self._running_child()
                try:
                    return exchange(child)
                except ChildEnded as ended:
                    begun = child.began_run
                    reason, status = str(ended), self._reap(child)
                except BaseException:
                    if child.running:
                        # It would answer this batch when it is sent the next one.
                        self._reap(child)
                    raise
                how = f"{reason}, and was killed" if reason else status.description
                if self._ending or self._closed:
                    raise self._ended()
                self._on_death()
                if begun and not repeatable and status == _KILLED:
                    # Perhaps memory was short, and a second run, which would show whether it is at fault, is not possible.
                    text = "%s: it ended (%s) after an answer to a request, which fails"
                    _log.warning(text, self._name, how)
                    raise ProcessDied("its process was killed before the last answer", how)
                if begun and (again or len(rows) > 1 or status != _KILLED):
                    raise self._died(how, inputs, rows)
                if again:
                    raise ProcessDied("the process ended before it ran the batch", how)
                again = True
                when = "while it ran one request" if begun else "between two batches"
                text = "%s: it ended (%s) %s; the batch runs again in another process"
                _log.warning(text, self._name, how, when)

    def end_runs(self) -> None:
        """Kill the process. The current run or start raises ProcessDied, and so do others before `allow_runs`."""
        with self._lock:
            self._ending = True
            if self._child is not None:
                self._child.kill()

    def allow_runs(self) -> None:
        """Permit runs again."""
        with self._lock:
            self._ending = False

    def close(self) -> None:
        """Let the process end; kill it if a run, or its own end, takes longer than a second. Idempotent."""
        ended = self._busy.acquire(timeout=_CLOSE_SECONDS)
        with self._lock:
            self._closed = True
            if self._child is not None and not ended:
                self._child.kill()
        if not ended:
            self._busy.acquire()
        try:
            child, self._child = self._child, None
            if child is not None:
                child.end(_CLOSE_SECONDS)
        finally:
            self._busy.release()

    def _running_child(self) -> FunctionChild:
        if self._ending or self._closed:
            raise self._ended()
        if self._child is not None:
            return self._child
        began = time.monotonic()
        if began < self._start_at:
            raise ProcessNotStarted(self._failure, self._start_at - began)
        try:
            child = self._start()
        except StartError as error:
            now = time.monotonic()
            delay = self._delay.after(now - began, served=False)
            self._start_at = now + delay
            self._failure = f"{self._name} cannot be started: {error}"
            if self._starts:
                _log.error("%s; the next try is in %g s", self._failure, delay)
            raise ProcessNotStarted(self._failure, delay) from None
        self._delay = RestartDelay()
        self._starts += 1
        again = " again" if self.restarts else ""
        seconds = time.monotonic() - began
        _log.info("%s: started%s as process %d in %.2f s", self._name, again, child.pid, seconds)
        return child

    def _start(self) -> FunctionChild:
        try:
            child = FunctionChild(self._app, self._model)
        except OSError as error:
            raise StartError(str(error)) from None
        with self._lock:
            self._child = child
            if self._ending or self._closed:
                child.kill()
        try:
            child.await_ready()
        except StartError:
            self._reap(child)
            raise
        except ChildEnded:
            how = self._reap(child).description
            if self._ending or self._closed:
                raise self._ended() from None
            raise StartError(f"its process ended before the function was loaded ({how})") from None
        return child

    def _reap(self, child: FunctionChild) -> ExitStatus:
        with self._lock:
            self._child = None
        return child.reap()

    def _ended(self) -> ProcessDied:
        return ProcessDied("the process that ran the batch was ended", "ended by the server")

    def _died(self, how: str, inputs: Mapping[str, Array], rows: Sequence[int]) -> ProcessDied:
        if len(rows) > 1:
            text = "%s: it ended (%s) while it ran a batch of %d requests; they run again in parts"
            _log.error(text, self._name, how, len(rows))
            return ProcessDied("the process that ran the batch ended", how)
        digest = digest_of_inputs(self._model, inputs)
        _log.error(
            "%s: it ended (%s) while it ran one request (hash %s), which gets INTERNAL; equal inputs are refused for %g s",
            *(self._name, how, digest, REFUSED_SECONDS),
        )
        self._refused.add(digest, time.monotonic() + REFUSED_SECONDS)
        return ProcessDied(REFUSED, how)

    def _check_refused(self, inputs: Mapping[str, Array], rows: Sequence[int]) -> None:
        # Nearly always none is refused, so that nothing is hashed.
        if self._refused and any(
            self._refused.has_digest(digest_of_inputs(self._model, each))
            for each in requests_of(inputs, rows)
        ):
            raise RequestRefused


class _ProcessAnswers:
    """See `Answers`. `cancel` does nothing, because a process is sent nothing while it computes an answer."""

    def __init__(self, inputs: Mapping[str, Array], exchange: Callable[..., Any]) -> None:
        # None from the first answer on.
        self._unsent: Mapping[str, Array] | None = inputs
        self._exchange = exchange
        self._over = False

    def read(self) -> Any:
        inputs, self._unsent, self._over = self._unsent, None, True
        # After the first answer it must not run again.
        answer = self._exchange(lambda child: child.next_answer(inputs), repeatable=inputs is not None)
        self._over = answer is NO_MORE
        return answer

    def close(self) -> None:
        if self._unsent is None and not self._over:
            self._over = True
            self._exchange(FunctionChild.end_answers, repeatable=False)

    def cancel(self) -> None:
        pass
