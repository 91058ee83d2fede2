"""`tensorferry` with built-in faults, which requests cause."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from chaos.content import Mark
from support.processes.faulty import Faults, failed

from tensorferry.server.__main__ import main
from tensorferry.server.runtime.recovery import recovering_instance
from tensorferry.server.runtime.session import Session
from tensorferry.server.startup import run_child

# Duration of a run that hangs.
HANG_SECONDS = 2.5
# Whether the model may leak; not on the server whose memory is followed.
LEAKS = "CHAOS_LEAKS"
# So few files of a process that some hundred connections exhaust them.
MOST_FILES = 256


class _ByMarks(Faults):
    """Faults of requests with marks, which are in the last column."""

    def __init__(self) -> None:
        super().__init__()
        self._leaked: list[bytes] = []

    def run(self, session: Session, inputs: Mapping[str, Any]) -> Any:
        marked = [row for row in inputs["x"].tolist() if row[3]]
        marks = {row[3] for row in marked}
        if Mark.RAISE in marks:
            raise failed("the model does not like a row")
        if Mark.EXIT in marks:
            raise SystemExit(3)
        if Mark.ABORT in marks:
            os.abort()
        hangs = False
        for row in marked:
            if row[3] == Mark.BREAK and self.first(tuple(row)):
                self.broken.add(id(session))
            if row[3] == Mark.HANG and self.first(tuple(row)):
                hangs = True
            if row[3] == Mark.LEAK and LEAKS in os.environ:
                self._leaked.append(b"x" * (1 << 20))
        if hangs:
            # Once, however many of its rows are marked.
            time.sleep(HANG_SECONDS)
        outputs = super().run(session, inputs)
        return {name: y[:-1] for name, y in outputs.items()} if Mark.SHAPE in marks else outputs

    def falls(self, values: Any) -> bool:
        by_worker = "-worker-" in threading.current_thread().name
        return values[3] == Mark.FALL and by_worker and self.first(tuple(values[:4].tolist()))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES))
    # A request can abort the process, which would write its memory to a file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    recovering_instance._FIRST_SECONDS = 0.05
    _ByMarks()
    if sys.argv[1] != "serve":
        # It is a child of `faulty_supervisor`.
        run_child("tensorferry.server.processes.server")
    sys.exit(main())
