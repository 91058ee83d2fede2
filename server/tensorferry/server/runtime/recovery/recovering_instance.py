"""Instance that recovers when its device runs out of memory, fails or hangs.

It runs a session and reports failures by the batcher's exceptions. A failed session is rebuilt on a worker thread,
outside every lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tensorferry.batcher import InstanceFailed, OutOfMemory, RunTimedOut
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.runtime.checks.sampling import Array
from tensorferry.server.runtime.gpu.staged_session import StagedSession
from tensorferry.server.runtime.gpu.staging_buffers import host_arrays
from tensorferry.server.runtime.recovery.error_classification import (
    DeviceErrorKind,
    classify_device_error,
    cuda_error_suffix,
)
from tensorferry.server.runtime.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.runtime.recovery.watchdog import GRACE_SECONDS, Overdue, RunLimits, WatchedRun
from tensorferry.server.runtime.session import Session

_log = logging.getLogger("tensorferry.server")

# Delay before the second try to rebuild a session. It doubles with every try, up to the longest.
_FIRST_SECONDS = 0.5
_LAST_SECONDS = 60.0
# After this number of tries the instance counts as unrecoverable. Tries go on.
_MAX_TRIES = 5


class RecoveringInstance(WatchedRun):
    """One instance of a model. One thread at a time may call `run`; the other methods are thread-safe.

    `rebuild` returns a new session that has run a row, or raises.
    """

    def __init__(
        self,
        session: Session,
        rebuild: Callable[[], Session],
        health: InstanceHealth,
        index: int,
        limits: RunLimits = RunLimits(),  # noqa: B008 (frozen)
    ) -> None:
        # None while it is broken. Written by the running thread, or by `recover` while nothing runs.
        self._session: Session | None = session
        # The session's staged form, if it has one.
        self.steps: StagedSession | None = session.staged
        # Fixed when the model is loaded: decides whether the batcher uses staged runs for this instance.
        self.staged = self.steps is not None
        self._rebuild = rebuild
        self._where = f"model {health.name} version {health.version}, instance {index} on {session.device}"
        self._tries = 0
        super().__init__(health, index, limits)

    def run(self, inputs: Mapping[str, Array], steps: StagedSession | None = None) -> Any:
        """Run the model once, as `Session.run` does. `inputs` is a batch loaded by `steps`, if those are given.

        Raises OutOfMemory, InstanceFailed or RunTimedOut for a failure of the device, else ModelFailedError.
        """
        session = self._session
        if session is None:
            raise InstanceFailed("the device failed, and its session is being rebuilt", recover=self.recover)
        self._began = time.monotonic()
        # In the order that `WatchedRun` asks for.
        self._running, self._overdue = session, None
        self._due = self._began + self._limit
        try:
            return session.run(inputs) if steps is None else steps(inputs)
        except ModelFailedError as error:
            failure = self._failure(error, self.finish())
            if failure is None:
                raise
        finally:
            self._due = None
            if self._overdue is not None and self.finish() is Overdue.HUNG:
                self._returned()
            # The failure's traceback holds this frame, and would keep the session's device memory.
            del session, steps
            self._running = None
        try:
            raise failure
        finally:
            del failure

    def copy_failure(self, error: ModelFailedError, steps: StagedSession) -> Exception:
        """Return the batcher's exception for a failure of `steps` to load or fetch a batch."""
        if steps is self.steps or classify_device_error(error.__cause__) is DeviceErrorKind.MEMORY:
            return self._failure(error, None) or error
        # A run on the same session has already reported that the session failed.
        recover = self.recover if self._session is None else None
        return InstanceFailed("the device failed before the batch was copied", _FIRST_SECONDS, recover)

    def _failure(self, error: ModelFailedError, overdue: Overdue | None) -> Exception | None:
        """Return the batcher's exception for a failed run; None if the request or the model is at fault."""
        cause = error.__cause__
        kind = classify_device_error(cause)
        # Only the text is logged: the traceback holds the session, and a log handler may keep the record.
        text = str(cause)
        if kind is DeviceErrorKind.MEMORY:
            _log.warning("%s: a batch does not fit into the memory: %s", self._where, text)
            return OutOfMemory("the device has no memory for it")
        if kind is not None:
            reason = f"the device failed{cuda_error_suffix(cause)}, and its session is being rebuilt"
            _log.error("%s: %s: %s", self._where, reason, text)
            self._session = self.steps = None
            self._tries = 0
            self._health.record(InstanceEvent.DEVICE_FAILED)
            self._health.mark_down(self._index, reason)
            return InstanceFailed(reason, _FIRST_SECONDS, self.recover)
        if overdue is not None:
            _log.error("%s: a run was ended after %g s (--run-timeout-seconds)", self._where, self._limit)
            if overdue is Overdue.ENDED:
                # A hung run has been counted by `_give_up_run`.
                self._health.record(InstanceEvent.RUN_ENDED)
            return RunTimedOut(
                f"the batch ran for longer than {self._limit:g} s, which --run-timeout-seconds allows, and was ended: "
                "raise that if this model takes so long"
            )
        return None

    def _give_up_run(self) -> None:
        if self._session is None:
            reason = f"the device failed, and its session is not rebuilt even after {self._rebuild_limit:g} s"
        else:
            reason = (
                f"a run did not end {GRACE_SECONDS:g} s after it was asked to, at {self._limit:g} s "
                "(--run-timeout-seconds): the device hangs"
            )
        _log.critical("%s: %s; restart the server if it does not recover", self._where, reason)
        self._health.record(InstanceEvent.HUNG)
        self._health.mark_down(self._index, reason, unrecoverable=True)
        self._give_up(RunTimedOut(reason))
        if not self.hangs and self._session is not None:
            # The run ended meanwhile, and may have marked the instance up before it was marked down here.
            self._health.mark_up(self._index)

    def _returned(self) -> None:
        if self._session is not None:
            _log.warning("%s: the run has returned after %.1f s", self._where, time.monotonic() - self._began)
            self._health.mark_up(self._index)

    def recover(self) -> None:
        """Rebuild the session. InstanceFailed says when to try again if that fails."""
        if self._session is not None:
            return
        self._tries += 1
        started = time.monotonic()
        self._overdue = None
        self._due = started + self._rebuild_limit
        session: Session | None = None
        failed = ""
        try:
            session = self._rebuild()
        except (StartError, ModelFailedError) as error:
            failed = str(error)
        except Exception as error:
            _log.exception("%s: the session cannot be rebuilt", self._where)
            failed = type(error).__name__
        finally:
            # Before `mark_up`, after which the watchdog must not give the rebuild up.
            self.finish()
        if session is not None:
            # `steps` first, because a thread that sees the session may use them.
            self.steps = session.staged
            self._session = session
            _log.warning(
                "%s: works again, rebuilt in %.2f s at try %d",
                self._where,
                time.monotonic() - started,
                self._tries,
            )
            self._health.record(InstanceEvent.REBUILT)
            self._health.mark_up(self._index)
            return
        delay = min(_FIRST_SECONDS * 2 ** (self._tries - 1), _LAST_SECONDS)
        unrecoverable = self._tries >= _MAX_TRIES
        reason = f"the device failed, and {self._tries} tries to rebuild its session failed"
        if unrecoverable:
            reason += ": restart the server"
        level = logging.CRITICAL if unrecoverable else logging.ERROR
        _log.log(level, "%s: %s; the next try is in %g s: %s", self._where, reason, delay, failed)
        self._health.record(InstanceEvent.REBUILD_FAILED)
        self._health.mark_down(self._index, reason, unrecoverable=unrecoverable)
        raise InstanceFailed(reason, delay)


class _LoadedBatch(NamedTuple):
    """Batch, or its outputs, in the memory of the session that `steps` belongs to."""

    steps: StagedSession
    batch: Any


class RecoveringStagedModel:
    """`StagedModel` on the current session of an instance. Without a session, batches stay in the batcher's memory.

    Raises as `RecoveringInstance.run` does. A batch may have been loaded into a session that has failed since.
    """

    def __init__(self, instance: RecoveringInstance) -> None:
        self._instance = instance
        self._states: Mapping[str, str] = {}

    def keep_states(self, states: Mapping[str, str]) -> None:
        """Keep these outputs on the device, by the inputs that they become."""
        self._states = states

    def place(self, tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> Mapping[str, Any] | None:
        """Return arrays in memory that the device can copy from directly, or None; and lists for states."""
        steps = self._instance.steps
        return None if steps is None else steps.place(tensors, self._states)

    def load(self, batch: Any) -> Any:
        """Copy a batch to the device."""
        steps = self._instance.steps
        return batch if steps is None else _LoadedBatch(steps, self._copied(steps, steps.load, batch))

    def __call__(self, batch: Any) -> Any:
        """Run the model on a loaded batch."""
        if not isinstance(batch, _LoadedBatch):
            return self._instance.run(batch)
        if batch.steps is not self._instance.steps:
            # Its device memory belongs to a session that is gone. Its arrays on the host are still valid.
            return self._instance.run(host_arrays(batch.batch))
        return _LoadedBatch(batch.steps, self._instance.run(batch.batch, batch.steps))

    def fetch(self, outputs: Any) -> Any:
        """Copy the outputs from the device."""
        if not isinstance(outputs, _LoadedBatch):
            return outputs
        return self._copied(outputs.steps, outputs.steps.fetch, outputs.batch)

    def _copied(self, steps: StagedSession, copy: Callable[[Any], Any], batch: Any) -> Any:
        try:
            return copy(batch)
        except ModelFailedError as error:
            raise self._instance.copy_failure(error, steps) from None
