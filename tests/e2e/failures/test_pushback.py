"""An overloaded real server, and clients that retry as it says: all succeed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from e2e.fixtures import Serve
from polling import until
from support.processes.faulty import HANG
from support.processes.metrics import scrape_until
from support.processes.probe import inputs

from tensorferry.client import InferenceClient, ResourceExhausted, Retry

CALLERS, EACH = 12, 3
PATIENCE = 120
# As many attempts as needed on a slow machine.
RETRY = Retry(attempts=40, budget=10_000)


@pytest.mark.parametrize("fair", [(), ("--fair-share",)])
def test_threads(serve_faulty: Serve, fair: tuple[str, ...], tmp_path: Path) -> None:
    """Each caller is a client. Without retries they are refused while the queue is full; with retries none is."""
    release = tmp_path / "release"
    options = ("--max-queue-size", "4", "--max-batch-size", "2", *fair)
    server = serve_faulty(*options, "--metrics-port", "0", FAULTY_RELEASE=str(release))
    refused: list[float | None] = []

    def call(number: int, retry: Retry | None) -> None:
        with InferenceClient(server.address, retry=retry) as one:
            for turn in range(EACH):
                tag = number * EACH + turn
                try:
                    result = one.infer("probe", inputs(tag, work=20), timeout=PATIENCE)
                    np.testing.assert_array_equal(result["y"], np.full((1, 4), 2 * tag, np.float32))
                except ResourceExhausted as error:
                    refused.append(error.retry_after)

    with ThreadPoolExecutor(CALLERS) as threads, InferenceClient(server.address) as holder:
        # Nothing else runs until it is released.
        held = holder.submit("probe", inputs(HANG), timeout=PATIENCE)
        scrape_until(server, lambda found: found["tensorferry_running_requests"] == 1)
        running = [threads.submit(call, number, None) for number in range(CALLERS)]
        until(lambda: refused, seconds=PATIENCE)
        release.touch()
        held.result(PATIENCE)
        for future in running:
            future.result(PATIENCE)
        assert None not in refused, "each has a retry time"
        refused.clear()
        list(threads.map(call, range(CALLERS), [RETRY] * CALLERS))
        assert not refused
