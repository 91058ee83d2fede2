"""An overloaded real server, and clients that retry as it says: all succeed."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from e2e.fixtures import Serve
from e2e.test_metrics import scrape_until
from polling import until
from support.processes.faulty import HANG

from tensorferry.client import InferenceClient, InferenceResult, ResourceExhausted, Retry, aio

CALLERS, EACH = 12, 3
PATIENCE = 120
# As many attempts as needed on a slow machine.
RETRY = Retry(attempts=40, budget=10_000)


def inputs(tag: int) -> dict[str, np.ndarray]:
    """Return inputs; each matrix product takes some tenths of a millisecond."""
    return {
        "x": np.full((1, 4), tag, np.float32),
        "index": np.zeros(1, np.int64),
        "work": np.full(1, 20, np.int64),
    }


def check(result: InferenceResult, tag: int) -> None:
    np.testing.assert_array_equal(result["y"], np.full((1, 4), 2 * tag, np.float32))


def options(client: str) -> tuple[str, ...]:
    return ("--max-queue-size", "4", "--max-batch-size", "2", *(("--fair-share",) if client else ()))


@pytest.mark.parametrize("client", ["", "fair"])
def test_threads(serve_faulty: Serve, client: str, tmp_path: Path) -> None:
    """Each caller is a client. Without retries they are refused while the queue is full; with retries
    none is.
    """
    release = tmp_path / "release"
    server = serve_faulty(*options(client), "--metrics-port", "0", FAULTY_RELEASE=str(release))
    refused: list[float | None] = []

    def call(number: int, retry: Retry | None) -> None:
        with InferenceClient(server.address, retry=retry) as one:
            for turn in range(EACH):
                tag = number * EACH + turn
                try:
                    check(one.infer("probe", inputs(tag), timeout=PATIENCE), tag)
                except ResourceExhausted as error:
                    refused.append(error.retry_after)

    with ThreadPoolExecutor(CALLERS) as threads, InferenceClient(server.address) as holder:
        # Nothing else runs until it is released.
        held = holder.submit("probe", inputs(int(HANG)), timeout=PATIENCE)
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


async def test_futures_tasks_and_streams(serve: Serve, probe_model: Path) -> None:
    server = serve(probe_model, *options(""))
    with InferenceClient(server.address, retry=RETRY) as client:
        futures = [client.submit("probe", inputs(tag), timeout=PATIENCE) for tag in range(CALLERS)]
        for tag, future in enumerate(futures):
            check(future.result(PATIENCE), tag)
        results = client.stream("probe", map(inputs, range(CALLERS)), ordered=True, timeout=PATIENCE)
        for tag, result in enumerate(results):
            check(result, tag)
    async with aio.InferenceClient(server.address, retry=RETRY) as aclient:

        async def call(tag: int) -> None:
            check(await aclient.infer("probe", inputs(tag), timeout=PATIENCE), tag)

        await asyncio.gather(*map(call, range(CALLERS)))
        streamed = aclient.stream("probe", map(inputs, range(CALLERS)), ordered=True, timeout=PATIENCE)
        assert [float(result["y"][0, 0]) async for result in streamed] == [
            2.0 * tag for tag in range(CALLERS)
        ]
