"""Requests above the limits of a real server, which the client sends in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from e2e.fixtures import Serve
from support.processes.server import ServerProcess

from tensorferry.client import InferenceClient, InferenceResult, InvalidArgument, ResourceExhausted, aio

IMAGES = np.random.default_rng(3).integers(0, 17, (1000, 8, 8), np.uint8)


def assert_joined(result: InferenceResult, expected: InferenceResult) -> None:
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(result[name], array)


async def test_parts_give_the_results_of_the_whole(
    serve: Serve, plain: ServerProcess, digits_model: Path
) -> None:
    with InferenceClient(plain.address) as client:
        expected = client.infer("digits", {"image": IMAGES})
    for limit in ("--max-request-rows", "100"), ("--max-message-bytes", "16KiB"):
        limited = serve(f"digits={digits_model}", *limit)
        with InferenceClient(limited.address) as client:
            assert_joined(client.infer("digits", {"image": IMAGES}, timeout=60), expected)
            [statistics] = client.statistics("digits")
            assert statistics.success.count >= 4
            with pytest.raises((InvalidArgument, ResourceExhausted)):
                client.submit("digits", {"image": IMAGES}).result(60)
        async with aio.InferenceClient(limited.address) as aclient:
            assert_joined(await aclient.infer("digits", {"image": IMAGES}, timeout=60), expected)
            assert_joined(await aclient.submit("digits", {"image": IMAGES}, timeout=60), expected)
