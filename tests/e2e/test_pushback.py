"""A real server that is overloaded, and clients that come back when they are told to: all succeed in the end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from e2e.fixtures import Serve

from tensorferry.client import InferenceClient, InferenceResult, ResourceExhausted, Retry, aio

CALLERS, EACH = 24, 3
PATIENCE = 120
# As often as it takes, be the machine as slow as it may.
RETRY = Retry(attempts=40, budget=10_000)


def inputs(tag: int, work: int = 20) -> dict[str, np.ndarray]:
    """Some tenths of a millisecond for each product that the model makes of it."""
    return {
        "x": np.full((1, 4), tag, np.float32),
        "index": np.zeros(1, np.int64),
        "work": np.full(1, work, np.int64),
    }


def check(result: InferenceResult, tag: int) -> None:
    np.testing.assert_array_equal(result["y"], np.full((1, 4), 2 * tag, np.float32))


def options(client: str) -> tuple[str, ...]:
    return ("--max-queue-size", "4", "--max-batch-size", "2", *(("--fair-share",) if client else ()))


@pytest.mark.parametrize("client", ["", "fair"])
def test_threads(serve: Serve, probe_model: Path, client: str) -> None:
    """Each caller is a client of its own; without retries most are refused, with them none."""
    server = serve(probe_model, *options(client))

    def call(number: int, retry: Retry | None) -> int:
        refusals = 0
        with InferenceClient(server.address, retry=retry) as one:
            for turn in range(EACH):
                tag = number * EACH + turn
                try:
                    # Without retries they come but once: none is to be too late to meet a full queue.
                    work = 20 if retry else 200
                    check(one.infer("probe", inputs(tag, work), timeout=PATIENCE), tag)
                except ResourceExhausted as error:
                    refusals += 1 if error.retry_after is not None else CALLERS * EACH * 2
        return refusals

    with ThreadPoolExecutor(CALLERS) as threads:
        refusals = sum(threads.map(call, range(CALLERS), [None] * CALLERS))
        assert 0 < refusals <= CALLERS * EACH, "it is overloaded, and says when to come back"
        assert sum(threads.map(call, range(CALLERS), [RETRY] * CALLERS)) == 0


def test_futures_and_streams(serve: Serve, probe_model: Path) -> None:
    server = serve(probe_model, *options(""))
    with InferenceClient(server.address, retry=RETRY) as client:
        futures = [client.submit("probe", inputs(tag), timeout=PATIENCE) for tag in range(CALLERS)]
        for tag, future in enumerate(futures):
            check(future.result(PATIENCE), tag)
        results = client.stream("probe", map(inputs, range(CALLERS)), ordered=True, timeout=PATIENCE)
        for tag, result in enumerate(results):
            check(result, tag)


async def test_tasks(serve: Serve, probe_model: Path) -> None:
    server = serve(probe_model, *options(""))
    async with aio.InferenceClient(server.address, retry=RETRY) as client:

        async def call(tag: int) -> None:
            check(await client.infer("probe", inputs(tag), timeout=PATIENCE), tag)

        await asyncio.gather(*map(call, range(CALLERS)))
        tag = 0
        async for result in client.stream(
            "probe", map(inputs, range(CALLERS)), ordered=True, timeout=PATIENCE
        ):
            check(result, tag)
            tag += 1
        assert tag == CALLERS
