"""Joined calls of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from client.coalescing.rigs import BAD, PATIENT, Script, expected, inputs
from client.scripted import ScriptedServer

from tensorferry import client as tf
from tensorferry.client import Coalesce, InferenceResult, aio

Tasks = list["asyncio.Task[InferenceResult]"]


@pytest.fixture
def script(server: ScriptedServer) -> Script:
    script = Script(held=0)
    script.serve(server)
    return script


@pytest.fixture
async def client(server: ScriptedServer, script: Script) -> AsyncIterator[aio.InferenceClient]:
    async with aio.InferenceClient(server.target, coalesce=PATIENT) as client:
        await client.metadata("m")
        yield client
    script.release.set()


def calls(client: aio.InferenceClient, numbers: Any, **options: Any) -> Tasks:
    return [client.submit("m", inputs(number), **options) for number in numbers]


async def assert_answers(tasks: Tasks, numbers: Any) -> None:
    results = await asyncio.wait_for(asyncio.gather(*tasks), 30)
    for result, number in zip(results, numbers, strict=True):
        np.testing.assert_array_equal(result["x"], expected(number))


async def acquired(semaphore: Any) -> bool:
    return await asyncio.to_thread(semaphore.acquire, timeout=30)


async def test_calls_of_one_turn_travel_together(client: aio.InferenceClient, script: Script) -> None:
    await assert_answers(calls(client, range(5)), range(5))
    assert script.messages == [[0, 1, 2, 3, 4]]


async def test_calls_that_wait_anyway_travel_together(client: aio.InferenceClient, script: Script) -> None:
    script.held = 1
    first = calls(client, [0])
    assert await acquired(script.begun)
    tasks = calls(client, [1, 2])
    await asyncio.sleep(0)
    tasks += calls(client, [3])
    await asyncio.sleep(0)
    script.release.set()
    await assert_answers(first + tasks, range(4))
    assert script.messages == [[0], [1, 2, 3]]


async def test_callers_that_return_together_stay_together(
    client: aio.InferenceClient, script: Script
) -> None:
    async def caller(number: float) -> None:
        for step in range(3):
            result = await client.infer("m", inputs(number + step))
            np.testing.assert_array_equal(result["x"], expected(number + step))

    await asyncio.wait_for(asyncio.gather(caller(10), caller(20), caller(30)), 30)
    assert script.messages == [[10, 20, 30], [11, 21, 31], [12, 22, 32]]


async def test_full_messages_do_not_wait(client: aio.InferenceClient, script: Script) -> None:
    await assert_answers(calls(client, range(20)), range(20))
    assert sorted(map(len, script.messages)) == [4, 8, 8]


async def test_a_call_waits_no_longer_than_the_longest_wait(server: ScriptedServer, script: Script) -> None:
    script.held = 1
    async with aio.InferenceClient(server.target, coalesce=Coalesce(max_wait=0.001)) as client:
        first = calls(client, [0])
        assert await acquired(script.begun)
        await assert_answers(calls(client, [1]), [1])
        assert not first[0].done()
        script.release.set()
        await assert_answers(first, [0])


async def test_calls_that_cannot_be_joined_do_not_wait(client: aio.InferenceClient, script: Script) -> None:
    script.held = 1
    first = calls(client, [0])
    assert await acquired(script.begun)
    assert (await client.infer("m", inputs(1), request_id="mine")).id == "mine"
    await assert_answers(calls(client, [3], version="2"), [3])
    assert not first[0].done()
    script.release.set()
    await assert_answers(first, [0])


async def test_a_bad_row_fails_only_its_call(client: aio.InferenceClient, script: Script) -> None:
    tasks = calls(client, [1, 2, BAD, 3])
    with pytest.raises(tf.InvalidArgument, match="a bad row"):
        await tasks.pop(2)
    await assert_answers(tasks, [1, 2, 3])
    assert script.messages[0] == [1, 2, BAD, 3]
    assert sorted(script.messages[1:]) == [[1], [2], [3], [BAD]]


async def test_an_answer_without_the_rows_of_its_calls_is_not_used(
    client: aio.InferenceClient, script: Script
) -> None:
    script.one_row = True
    await assert_answers(calls(client, [1, 2]), [1, 2])
    assert sorted(script.messages) == [[1], [1, 2], [2]]


@pytest.mark.parametrize("status", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_refused_messages_are_retried(
    client: aio.InferenceClient, script: Script, status: grpc.StatusCode
) -> None:
    script.statuses, script.trailers = [status], (("grpc-retry-pushback-ms", "10"),)
    await assert_answers(calls(client, [1, 2]), [1, 2])
    assert client._retries._left < 99


async def test_errors_of_all_rows_are_those_of_each_call(client: aio.InferenceClient, script: Script) -> None:
    script.statuses = [grpc.StatusCode.PERMISSION_DENIED]
    errors = await asyncio.gather(*calls(client, [1, 2]), return_exceptions=True)
    assert all(isinstance(error, tf.PermissionDenied) for error in errors)
    assert errors[0] is not errors[1]
    assert script.messages == [[1, 2]]


async def test_a_cancelled_call_is_not_sent(client: aio.InferenceClient, script: Script) -> None:
    script.held = 1
    first = calls(client, [0])
    assert await acquired(script.begun)
    tasks = calls(client, [1, 2, 3])
    await asyncio.sleep(0)
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    script.release.set()
    await assert_answers([*first, tasks[0], tasks[2]], [0, 1, 3])
    assert script.messages[1:] == [[1, 3]]


async def test_a_message_is_cancelled_with_its_last_call(client: aio.InferenceClient, script: Script) -> None:
    script.held = 1
    one, two = calls(client, [1, 2])
    assert await acquired(script.begun)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    assert not script.left.acquire(blocking=False)
    two.cancel()
    with pytest.raises(asyncio.CancelledError):
        await two
    assert await acquired(script.left)
    script.release.set()
    await assert_answers(calls(client, [3]), [3])


async def test_a_lone_call_that_is_cancelled_lets_others_go(
    client: aio.InferenceClient, script: Script
) -> None:
    script.held = 1
    (first,) = calls(client, [0])
    assert await acquired(script.begun)
    tasks = calls(client, [1, 2])
    await asyncio.sleep(0)
    first.cancel()
    await assert_answers(tasks, [1, 2])
    script.release.set()


async def test_closing_ends_calls_that_wait(client: aio.InferenceClient, script: Script) -> None:
    script.held = 1
    tasks = calls(client, [0])
    assert await acquired(script.begun)
    tasks += calls(client, [1, 2])
    await asyncio.sleep(0)
    await client.close()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, tf.Cancelled)
    script.release.set()
    assert script.messages == [[0]]


async def test_closing_ends_a_message_in_flight(client: aio.InferenceClient, script: Script) -> None:
    script.held = 1
    tasks = calls(client, [0, 1])
    assert await acquired(script.begun)
    await client.close()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, tf.Cancelled)
    script.release.set()


async def test_timeouts_end_calls_of_a_message(server: ScriptedServer, script: Script) -> None:
    script.held = 1
    async with aio.InferenceClient(server.target, coalesce=Coalesce(max_wait=0.001)) as client:
        await client.metadata("m")
        tasks = calls(client, [0, 1], timeout=0.2)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, tf.DeadlineExceeded)
    assert script.messages == [[0, 1]]
    script.release.set()
