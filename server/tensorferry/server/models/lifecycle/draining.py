"""The end of a server's requests, before its models are closed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tensorferry.server.models.lifecycle.registry import Model


def wait_until_idle(models: Sequence[Model], until: float) -> bool:
    """Wait until no model has a request, at most until a monotonic time; return whether that is so.

    New requests are only those that models' functions and pipelines make for accepted ones. From now on no batch waits for
    more requests, so that all of these end sooner.
    """
    for model in models:
        model.batcher.flush()
    before = -1
    # Each model was idle at some time of a pass. If none accepted anything during the pass, all are idle at its end.
    while (accepted := sum([model.batcher.statistics().accepted for model in models])) != before:
        before = accepted
        for model in models:
            if not model.batcher.wait_idle(max(0.0, until - time.monotonic())):
                return False
    return True
