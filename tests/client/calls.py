"""Calls of either client that tests name, and the output of shell commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import pytest

from tensorferry.client import InferenceClient, aio

Client = InferenceClient | aio.InferenceClient
Output: TypeAlias = pytest.CaptureFixture[str]
both_clients = pytest.mark.parametrize(
    "kind", [InferenceClient, aio.InferenceClient], ids=["threads", "asyncio"]
)


def call(client: InferenceClient, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method, wait for a future, and collect a stream."""
    result = getattr(client, method)(*arguments, **options)
    if isinstance(result, Future):
        return result.result(30)
    return list(result) if isinstance(result, Generator) else result


async def either(client: Client, method: str, *arguments: Any, **options: Any) -> Any:
    """Do the same with either client."""
    if isinstance(client, InferenceClient):
        return call(client, method, *arguments, **options)
    result: Any = getattr(client, method)(*arguments, **options)
    return [one async for one in result] if inspect.isasyncgen(result) else await result


def refusal(capsys: Output, command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> str:
    """Return the one line with which a command exits with 2."""
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 2, arguments
    error = capsys.readouterr().err
    assert error.count("\n") == 1, arguments
    return error
