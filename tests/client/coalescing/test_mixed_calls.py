"""Many callers at once, with calls of every kind: each gets its own outcome, and none is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from client.coalescing.rigs import BAD, Script, expected, inputs
from client.scripted import ScriptedServer
from polling import until

from tensorferry import client as tf
from tensorferry.client import Coalesce, InferenceClient, aio

CALLERS = 12
CALLS = 60
KINDS = ("good", "good", "good", "rows", "bad", "priority", "id", "timeout", "cancelled", "future")


@pytest.fixture
def script(server: ScriptedServer) -> Script:
    script = Script(held=0)
    script.serve(server)
    return script


def choices(caller: int) -> Iterator[tuple[str, float, int]]:
    """Return kind, first number and rows of each call of a caller, the same in every run."""
    chance = random.Random(caller)
    for call in range(CALLS):
        kind = chance.choice(KINDS)
        yield kind, 1000.0 * (caller + 1) + call, chance.randint(1, 3) if kind == "rows" else 1


def options_of(kind: str, number: float) -> dict[str, Any]:
    if kind == "priority":
        return {"parameters": {"priority": int(number) % 2}}
    if kind == "id":
        return {"request_id": str(number)}
    return {"timeout": 20.0} if kind == "timeout" else {}


def assert_answer(result: tf.InferenceResult, kind: str, number: float, rows: int) -> None:
    np.testing.assert_array_equal(result["x"], expected(number, rows))
    assert result.id == (str(number) if kind == "id" else "")


def test_threads(server: ScriptedServer, script: Script) -> None:
    with InferenceClient(server.target, coalesce=Coalesce(max_wait=0.002)) as client:

        def call(caller: int) -> int:
            done = 0
            for kind, number, rows in choices(caller):
                options = options_of(kind, number)
                if kind == "bad":
                    with pytest.raises(tf.InvalidArgument, match="a bad row"):
                        client.infer("m", inputs(BAD), **options)
                elif kind == "cancelled":
                    future = client.submit("m", inputs(number), **options)
                    if future.cancel():
                        with pytest.raises(CancelledError):
                            future.result(60)
                    else:
                        assert_answer(future.result(), kind, number, rows)
                elif kind == "future":
                    assert_answer(client.submit("m", inputs(number, rows)).result(60), kind, number, rows)
                else:
                    assert_answer(client.infer("m", inputs(number, rows), **options), kind, number, rows)
                done += 1
            return done

        with ThreadPoolExecutor(CALLERS) as threads:
            assert list(threads.map(call, range(CALLERS))) == [CALLS] * CALLERS
        # A message ends after its calls.
        until(lambda: not client._coalesced[0]._gathering._states)
    assert max(map(len, script.messages)) > 1


async def test_tasks(server: ScriptedServer, script: Script) -> None:
    async with aio.InferenceClient(server.target, coalesce=Coalesce(max_wait=0.002)) as client:

        async def call(caller: int) -> int:
            done = 0
            for kind, number, rows in choices(caller):
                options = options_of(kind, number)
                if kind == "bad":
                    with pytest.raises(tf.InvalidArgument, match="a bad row"):
                        await client.infer("m", inputs(BAD), **options)
                elif kind == "cancelled":
                    task = client.submit("m", inputs(number), **options)
                    for _ in range(caller % 4):
                        await asyncio.sleep(0)
                    if task.cancel():
                        with pytest.raises(asyncio.CancelledError):
                            await task
                    else:
                        assert_answer(task.result(), kind, number, rows)
                else:
                    assert_answer(
                        await client.infer("m", inputs(number, rows), **options), kind, number, rows
                    )
                done += 1
            return done

        callers = asyncio.gather(*(call(caller) for caller in range(CALLERS)))
        assert await asyncio.wait_for(callers, 100) == [CALLS] * CALLERS
        await asyncio.to_thread(until, lambda: not client._coalesced[0]._gathering._states)
    assert max(map(len, script.messages)) > 1
