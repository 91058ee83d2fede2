"""Calls of methods that tests name."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from tensorferry.client import InferenceClient


def call(client: InferenceClient, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method, wait for a future, and collect a stream."""
    result = getattr(client, method)(*arguments, **options)
    if isinstance(result, Future):
        return result.result(30)
    return list(result) if isinstance(result, Generator) else result
