"""`tensorferry` with built-in faults, which requests cause."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from chaos.content import Mark
from support.processes.faulty import _BROKEN, failed

from tensorferry.batcher.execution.executor import BatchExecutor
from tensorferry.batcher.request import BatchAssignment, Request
from tensorferry.server.__main__ import main
from tensorferry.server.runtime.recovery import recovering_instance
from tensorferry.server.runtime.session import Session

# Duration of a run that hangs.
HANG_SECONDS = 2.5
# Whether the model may leak; not on the server whose memory is followed.
LEAKS = "CHAOS_LEAKS"


class Faults:
    """Stands between the batcher and the sessions."""

    def __init__(self) -> None:
        # Guards _seen and _broken.
        self._lock = threading.Lock()
        self._seen: set[tuple[float, ...]] = set()
        self._broken: set[int] = set()
        self._leaked: list[bytes] = []
        self._run, self._make, self._guarded = Session.run, Session.__init__, BatchExecutor.run
        Session.run = self.run  # type: ignore[method-assign]
        Session.__init__ = self.make  # type: ignore[method-assign]
        BatchExecutor.run = self.guarded  # type: ignore[method-assign]

    def _first(self, row: Any) -> bool:
        with self._lock:
            known = tuple(row) in self._seen
            self._seen.add(tuple(row))
            return not known

    @property
    def run(self) -> Any:
        def run(session: Session, inputs: Mapping[str, Any]) -> Any:
            x = inputs["x"]
            marked = [row for row in x.tolist() if row[3]]
            marks = {row[3] for row in marked}
            if not marks.isdisjoint((Mark.RAISE,)):
                raise failed("the model does not like a row")
            if Mark.EXIT in marks:
                raise SystemExit(3)
            if Mark.ABORT in marks:
                os.abort()
            hangs = False
            for row in marked:
                if row[3] == Mark.BREAK and self._first(row):
                    self._broken.add(id(session))
                if row[3] == Mark.HANG and self._first(row):
                    hangs = True
                if row[3] == Mark.LEAK and LEAKS in os.environ:
                    self._leaked.append(b"x" * (1 << 20))
            if hangs:
                # Once, however many of its rows are marked.
                time.sleep(HANG_SECONDS)
            if id(session) in self._broken:
                raise failed(_BROKEN)
            outputs = self._run(session, inputs)
            return {name: y[:-1] for name, y in outputs.items()} if Mark.SHAPE in marks else outputs

        return run

    @property
    def make(self) -> Any:
        def make(session: Session, *arguments: Any, **options: Any) -> None:
            self._make(session, *arguments, **options)
            self._broken.clear()

        return make

    @property
    def guarded(self) -> Any:
        def guarded(running: BatchExecutor, batch: Sequence[Request], work: BatchAssignment) -> Any:
            for request in batch:
                for tensor in request.tensors:
                    row = np.frombuffer(tensor.data, np.float32, 4).tolist() if request.rows else [0.0] * 4
                    if (
                        row[3] == Mark.FALL
                        and "-worker-" in threading.current_thread().name
                        and self._first(row)
                    ):
                        raise SystemExit
            return self._guarded(running, batch, work)

        return guarded


def prepare() -> None:
    """Build the faults into this process."""
    recovering_instance._FIRST_SECONDS = 0.05
    # For analysis of a hang.
    faulthandler.register(signal.SIGUSR1)
    Faults()


if __name__ == "__main__":
    prepare()
    sys.exit(main())
