from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client.scripted import ScriptedServer, ScriptedServicer, model
from support.processes.server import ServerProcess, running

from tensorferry.client import InferenceClient, aio

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "digits.onnx"


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server with the model `digits`, which clients may control, and with shared memory."""
    repository = tmp_path_factory.mktemp("repository")
    (repository / "digits" / "1").mkdir(parents=True)
    shutil.copy(DIGITS, repository / "digits" / "1" / "model.onnx")
    options = ("--model-repository", str(repository), "--model-control", "explicit", "--load-model", "digits")
    with running(*options, "--allow-log-settings", "--allow-shared-memory", transport="lane") as server:
        yield server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A running server with the models `digits` (UINT8 images), `text` (BYTES and FP32) and `row` (INT64)."""
    image, text = {"image": "UINT8 -1 8 8"}, {"words": "BYTES -1", "weights": "FP32 -1 2"}
    with ScriptedServer.running() as scripted:
        row = scripted.servicer.models.pop("row")
        scripted.servicer.models |= {
            "digits": model("digits", image, image), "text": model("text", text, text), "row": row,
        }  # fmt: skip
        yield scripted


@pytest.fixture
def other() -> Iterator[ScriptedServer]:
    """A second server with the model `row`."""
    with ScriptedServer.running() as scripted:
        yield scripted


@pytest.fixture
def servicer(server: ScriptedServer) -> ScriptedServicer:
    return server.servicer


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[InferenceClient]:
    with InferenceClient(server.target) as client:
        yield client


@pytest.fixture
async def aclient(server: ScriptedServer) -> AsyncIterator[aio.InferenceClient]:
    async with aio.InferenceClient(server.target) as client:
        yield client


class Streams:
    """`stream` of either client, as a generator; that of asyncio runs in its own event loop, step by step.

    A source of `one_by_one` yields the first request, and each other one after a call of `next_one`.
    """

    def __init__(
        self,
        stream: Callable[..., Generator[Any, None, None]],
        close: Callable[[], None],
        one_by_one: Callable[[Iterable[Any]], Any],
        next_one: Callable[[], None],
    ) -> None:
        self._stream = stream
        self.close_client = close
        self.one_by_one = one_by_one
        self.next_one = next_one

    def __call__(self, *arguments: Any, **options: Any) -> Generator[Any, None, None]:
        return self._stream(*arguments, **options)


@contextlib.contextmanager
def streams_of(kind: str, target: str, **options: Any) -> Iterator[Streams]:
    """Yield the streams of a client for threads or for asyncio."""
    if kind == "threads":
        turns = threading.Semaphore(0)

        def one_by_one(requests: Iterable[Any]) -> Iterator[Any]:
            for request in requests:
                yield request
                assert turns.acquire(timeout=30)

        with InferenceClient(target, **options) as threads:
            yield Streams(threads.stream, threads.close, one_by_one, turns.release)
            turns.release()
        return
    with asyncio.Runner() as runner:

        async def make() -> aio.InferenceClient:
            return aio.InferenceClient(target, **options)

        client = runner.run(make())

        def stream(*arguments: Any, **options: Any) -> Generator[Any, None, None]:
            async def open_() -> AsyncGenerator[Any]:
                return client.stream(*arguments, **options)

            outcomes = runner.run(open_())
            try:
                while True:
                    try:
                        outcome = runner.run(anext(outcomes))
                    except StopAsyncIteration:
                        return
                    yield outcome
            finally:
                runner.run(outcomes.aclose())

        turns_of_tasks = asyncio.Semaphore(0)

        async def one_by_one_in_a_task(requests: Iterable[Any]) -> AsyncIterator[Any]:
            for request in requests:
                yield request
                await turns_of_tasks.acquire()

        async def tasks() -> list[str]:
            return [task.get_name() for task in asyncio.all_tasks() if "feed" in task.get_name()]

        yield Streams(
            stream, lambda: runner.run(client.close()), one_by_one_in_a_task, turns_of_tasks.release
        )
        runner.run(client.close())
        assert runner.run(tasks()) == []


@pytest.fixture(params=["threads", "asyncio"])
def stream(request: pytest.FixtureRequest, server: ScriptedServer) -> Iterator[Streams]:
    with streams_of(request.param, server.target) as streams:
        yield streams
