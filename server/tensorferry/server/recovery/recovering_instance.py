"""An instance that survives its device: out of memory, broken, or hung.

It runs a session and tells the batcher, in the batcher's words, what went wrong; a broken session is built anew,
on a worker's thread and outside every lock.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from tensorferry.batcher import InstanceFailed, OutOfMemory, RunTimedOut, StagedModel
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.recovery.error_classification import (
    DeviceErrorKind,
    classify_device_error,
    cuda_error_suffix,
)
from tensorferry.server.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.recovery.watchdog import GRACE_SECONDS, RunOutcome, Watchdog, WatchedRun
from tensorferry.server.runtime.sampling import Array
from tensorferry.server.runtime.session import Session

_log = logging.getLogger("tensorferry.server")

# After a try in vain the next is so many seconds later, then twice as many, up to the last; after so many tries
# it is said that the process has to be restarted.
_FIRST_SECONDS = 0.5
_LAST_SECONDS = 60.0
_MAX_TRIES = 5
# A session is built and warmed up anew in about the time of the first one, or it hangs.
REBUILD_SECONDS = 60.0
_REBUILD_FACTOR = 10.0


class RecoveringInstance:
    """One instance of a model; `run` is called by one thread at a time, the rest by any.

    `rebuild` gives a new session, warmed up, or raises; `took` is how long the first one took. With `limit` 0 a
    run may take for ever. `give_up` is told when a run, or a rebuild, does not even end when it is told to.
    """

    def __init__(
        self,
        session: Session,
        rebuild: Callable[[], Session],
        health: InstanceHealth,
        index: int,
        watchdog: Watchdog | None = None,
        *,
        limit: float = 0.0,
        took: float = 0.0,
    ) -> None:
        # None while it is broken. The runs' and, while there are none, the recovery's.
        self._session: Session | None = session
        # The same in steps, where it can be had so.
        self.steps: StagedModel | None = session.staged
        # Whether it could when it was loaded: then it is asked for steps for good.
        self.staged = self.steps is not None
        self._rebuild = rebuild
        self._health = health
        self._index = index
        self._limit = limit
        self._most_rebuild = max(REBUILD_SECONDS, _REBUILD_FACTOR * took)
        self._where = f"model {health.name} version {health.version}, instance {index} on {session.device}"
        self._tries = 0
        self._began = 0.0
        self.give_up: Callable[[RunTimedOut], None] = lambda error: None
        # Weakly: the session's threads and memory go with the last who holds it, not when the collector of cycles comes by.
        hung = weakref.WeakMethod(self._hung)

        def tell() -> None:
            here = hung()
            if here is not None:
                here()

        self._watched = WatchedRun(tell)
        if watchdog is not None:
            watchdog.watch(self._watched)

    def run(self, inputs: Mapping[str, Array], steps: StagedModel | None = None) -> Any:
        """Runs the model once, as `Session.run` does; with `steps`, which are in use, a batch that these have loaded.

        OutOfMemory, InstanceFailed or RunTimedOut where that is what happened, else ModelFailedError.
        """
        session = self._session
        if session is None:
            raise InstanceFailed(
                "the device failed, and its session is being built anew", recover=self.recover
            )
        if self._limit:
            self._began = self._watched.begin(self._limit, session.end_runs, session.allow_runs)
        try:
            return session.run(inputs) if steps is None else steps(inputs)
        except ModelFailedError as error:
            failure = self._failure(error, self._over())
            if failure is None:
                raise
        finally:
            # This frame is in the failure's traceback, and would keep what the session holds on the device.
            del session, steps
            if self._limit and self._watched.finish() is RunOutcome.HUNG:
                self._returned()
        try:
            raise failure
        finally:
            del failure

    def copy_failure(self, error: ModelFailedError, steps: StagedModel) -> Exception:
        """What it is to the batcher that these steps could not load a batch, or fetch one."""
        if steps is self.steps or classify_device_error(error.__cause__) is DeviceErrorKind.MEMORY:
            return self._failure(error, RunOutcome.IN_TIME) or error
        # What ran meanwhile has said that they are broken.
        recover = self.recover if self._session is None else None
        return InstanceFailed("the device failed before the batch was copied", _FIRST_SECONDS, recover)

    def _over(self) -> RunOutcome:
        return self._watched.finish() if self._limit else RunOutcome.IN_TIME

    def _failure(self, error: ModelFailedError, verdict: RunOutcome) -> Exception | None:
        """What a failed run is to the batcher; None where the request or the model is at fault."""
        cause = error.__cause__
        trouble = classify_device_error(cause)
        # Its text alone: its traceback holds the session, and whoever handles log records may keep it.
        text = str(cause)
        if trouble is DeviceErrorKind.MEMORY:
            _log.warning("%s: a batch does not fit into the memory: %s", self._where, text)
            return OutOfMemory("the device has no memory for it")
        if trouble is not None:
            reason = f"the device failed{cuda_error_suffix(cause)}, and its session is being built anew"
            _log.error("%s: %s: %s", self._where, reason, text)
            self._session = self.steps = None
            self._tries = 0
            self._health.record(InstanceEvent.DEVICE_FAILED)
            self._health.mark_down(self._index, reason)
            return InstanceFailed(reason, _FIRST_SECONDS, self.recover)
        if verdict is not RunOutcome.IN_TIME:
            _log.error("%s: a run was ended after %g s (--run-timeout-seconds)", self._where, self._limit)
            if verdict is RunOutcome.ENDED:
                # One that hung was counted as such.
                self._health.record(InstanceEvent.RUN_ENDED)
            return RunTimedOut(self._too_long())
        return None

    def _too_long(self) -> str:
        return (
            f"the batch ran for longer than {self._limit:g} s, which --run-timeout-seconds allows, and was ended: raise "
            "that if this model takes so long"
        )

    def _hung(self) -> None:
        """On the watchdog's thread: what was told to end did not."""
        if self._session is None:
            reason = (
                f"the device failed, and its session is not built anew even after {self._most_rebuild:g} s"
            )
        else:
            reason = (
                f"a run did not end {GRACE_SECONDS:g} s after it was told to, at {self._limit:g} s "
                "(--run-timeout-seconds): the device hangs"
            )
        _log.critical("%s: %s; restart the server if it stays so", self._where, reason)
        self._health.record(InstanceEvent.HUNG)
        self._health.mark_down(self._index, reason, unrecoverable=True)
        self.give_up(RunTimedOut(reason))
        if not self._watched.hangs and self._session is not None:
            # It ended meanwhile, and may have said so before.
            self._health.mark_up(self._index)

    def _returned(self) -> None:
        if self._session is not None:
            _log.warning("%s: the run has returned after %.1f s", self._where, time.monotonic() - self._began)
            self._health.mark_up(self._index)

    def recover(self) -> None:
        """Builds the session anew; InstanceFailed, with when to try again, when that does not succeed."""
        if self._session is not None:
            return
        self._tries += 1
        started = time.monotonic()
        self._watched.begin(self._most_rebuild)
        try:
            session = self._rebuild()
        except (StartError, ModelFailedError) as error:
            failed = str(error)
        except Exception as error:
            _log.exception("%s: the session cannot be built anew", self._where)
            failed = type(error).__name__
        else:
            # In this order: who sees the session may use its steps.
            self.steps = session.staged
            self._session = session
            _log.warning(
                "%s: works again, built anew in %.2f s at try %d",
                self._where,
                time.monotonic() - started,
                self._tries,
            )
            self._health.record(InstanceEvent.REBUILT)
            self._health.mark_up(self._index)
            return
        finally:
            self._watched.finish()
        again = min(_FIRST_SECONDS * 2 ** (self._tries - 1), _LAST_SECONDS)
        unrecoverable = self._tries >= _MAX_TRIES
        reason = f"the device failed, and its session could not be built anew at {self._tries} tries"
        if unrecoverable:
            reason += ": the server has to be restarted"
        level = logging.CRITICAL if unrecoverable else logging.ERROR
        _log.log(level, "%s: %s; the next try is in %g s: %s", self._where, reason, again, failed)
        self._health.record(InstanceEvent.REBUILD_FAILED)
        self._health.mark_down(self._index, reason, unrecoverable=unrecoverable)
        raise InstanceFailed(reason, again)
