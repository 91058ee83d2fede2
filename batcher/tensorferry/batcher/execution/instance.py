"""One model function on its device, and the state that its workers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tensorferry.batcher.errors import InstanceFailed
from tensorferry.batcher.execution.staged_model import StagedModel
from tensorferry.batcher.request import Request


class NotRun(InstanceFailed):
    """Error of a batch that was not run at all, because its instance had failed before."""


class Instance:
    """One model function, run by one worker, or by two in turn if `pipelined`.

    If `divisible`, a request of several rows may be run in parts. Every method is thread-safe.
    """

    def __init__(
        self,
        index: int,
        model_fn: Callable[[Any], Any],
        *,
        batched: bool,
        pipelined: bool,
        divisible: bool = False,
    ) -> None:
        self.index = index
        self.model_fn = model_fn
        self.staged = model_fn if isinstance(model_fn, StagedModel) else None
        self.batched = batched
        self.pipelined = pipelined
        self.divisible = divisible
        # Held while the device runs a batch. Only the model function is called while it is held.
        self.device_lock = threading.Lock()
        # Batches that workers have taken and not completed. Each list operation is atomic.
        self.in_flight: list[Sequence[Request]] = []
        # Brings the function back after a failure; it is not called until then. None while it works.
        self.recover: Callable[[], None] | None = None
        # The batch that the model function runs now. Written with `device_lock` held.
        self._running: Sequence[Request] | None = None
        # The current run was aborted and has not returned. `abort` writes it before it reads `_running`, a worker
        # reads it after it has written `_running`: so at least one of them sees that the run is over.
        self._aborted = False
        # A worker crashed and the instance has not worked since.
        self._crashed = False

    def begin_run(self, batch: Sequence[Request]) -> None:
        """Note that the model function runs a batch now; NotRun if it may not. With `device_lock` held."""
        if self.recover is not None or self._aborted:
            raise NotRun("the device failed before the batch ran", recover=self.recover)
        self._running = batch

    def end_run(self) -> bool:
        """Note that the model function returned or raised; return whether the run had been aborted."""
        self._running = None
        if not self._aborted:
            return False
        self._aborted = False
        return True

    def failed(self, error: InstanceFailed) -> None:
        """Keep the error's `recover`, by which a worker brings the function back."""
        self.recover = self.recover or error.recover

    def recovered(self) -> bool:
        """Note that the function works; return whether a worker had crashed before."""
        self.recover = None
        crashed, self._crashed = self._crashed, False
        return crashed

    def crashed(self) -> None:
        """Note that a worker crashed."""
        self._crashed = True

    def abort(self) -> None:
        """Let no other batch run until the current run returns."""
        self._aborted = True

    def aborted_batch(self) -> Sequence[Request] | None:
        """The batch whose run was aborted; None, and the instance works again, if that run has already returned."""
        running = self._running
        if running is None or not self._aborted:
            self._aborted = False
            return None
        return running
