"""A time limit on runs with unusual values, because a loop in a model may never end on NaN."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from tensorferry.server.runtime.checks.sampling import Array, Run
from tensorferry.server.runtime.session import Session


def with_time_limit(run: Run, session: Session, seconds: float) -> Run:
    """Return `run`, which uses the session, with a time limit: a longer run is terminated and raises."""

    def limited_run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        timer = threading.Timer(seconds, session.end_runs)
        timer.name = "tensorferry-batching-check"
        timer.start()
        try:
            return run(inputs)
        finally:
            timer.cancel()
            timer.join()
            session.allow_runs()

    return limited_run
