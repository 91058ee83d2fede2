"""One client of several real servers, one of which is killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.processes.server import ServerProcess

from tensorferry.client import InferenceClient, Retry, aio

IMAGES = {"image": np.zeros((1, 8, 8), np.uint8)}


@pytest.fixture
def pair(digits_model: Path) -> Iterator[list[ServerProcess]]:
    with ThreadPoolExecutor(2) as threads:
        starts = [
            threads.submit(ServerProcess.start, f"digits={digits_model}", transport="lane") for _ in range(2)
        ]
    servers = [start.result() for start in starts]
    yield servers
    for server in servers:
        server.stop()


def by_name(server: ServerProcess) -> str:
    return server.address.replace("127.0.0.1", "localhost")


def requests_of(server: ServerProcess) -> int:
    with InferenceClient(server.address) as client:
        [statistics] = client.statistics("digits")
        return statistics.success.count


def _each_gets_calls(pair: list[ServerProcess], targets: list[str]) -> bool:
    """Return whether both servers get calls of one client."""
    before = [requests_of(server) for server in pair]
    with InferenceClient(targets) as client:
        # gRPC's round_robin uses a connection as soon as it is there, so the second may come late.
        for _ in range(2000):
            client.infer("digits", IMAGES, timeout=60)
            if all(requests_of(server) > count for server, count in zip(pair, before, strict=True)):
                return True
    return False


def test_threads_share_their_calls_and_lose_none_when_a_server_is_killed(pair: list[ServerProcess]) -> None:
    assert _each_gets_calls(pair, [server.address for server in pair])
    assert _each_gets_calls(pair, [by_name(server) for server in pair])
    first, second = pair
    with InferenceClient([by_name(first), by_name(second)]) as client, ThreadPoolExecutor(8) as threads:
        assert client.wait_ready(60)
        calls = [threads.submit(client.infer, "digits", IMAGES, timeout=60) for _ in range(400)]
        calls[100].result(60)
        first.signal(signal.SIGKILL)
        for one in calls:
            assert one.result(60)["label"].size == 1
        first.wait()
        before = requests_of(second)
        for _ in range(10):
            client.infer("digits", IMAGES, timeout=60)
            assert client.submit("digits", IMAGES, timeout=60).result(60)["label"].size == 1
            assert len(list(client.stream("digits", [IMAGES], timeout=60))) == 1
        assert requests_of(second) == before + 30


async def test_asyncio_loses_no_call_when_a_server_is_killed(pair: list[ServerProcess]) -> None:
    first, second = pair
    # The default budget is for half as many calls as may be at the server that is killed.
    retry = Retry(budget=200)
    async with aio.InferenceClient([first.address, second.address], retry=retry) as client:
        assert await client.wait_ready(60)
        tasks = [client.submit("digits", IMAGES, timeout=60) for _ in range(200)]
        await tasks[20]
        first.signal(signal.SIGKILL)
        for task in tasks:
            assert (await task)["label"].size == 1
        first.wait()
        before = requests_of(second)
        for _ in range(10):
            await client.infer("digits", IMAGES, timeout=60)
            assert len([one async for one in client.stream("digits", [IMAGES], timeout=60)]) == 1
        assert requests_of(second) == before + 20
