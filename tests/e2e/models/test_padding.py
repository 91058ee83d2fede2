"""Requests of different lengths share batches on a real server, and get the answers that they get
alone.

The window is ten minutes, so a batch closes only when it is full. Every request is answered, so
different lengths have shared batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from e2e.fixtures import Serve
from support.models import small

from tensorferry.client import InferenceClient, InferenceResult

SIZE = 8
PADDED_LENGTHS = (8, 16, 32)
OPTIONS = ("--pad-lengths", "sequence=8,16,32", "--pad-values", "ids=0,mask=0")

Inputs = dict[str, npt.NDArray[np.int64]]


@pytest.fixture(scope="session")
def masked_model(model_dir: Path) -> Path:
    return small.masked_mean(model_dir / "masked.onnx")


def text(length: int, rows: int, seed: int) -> Inputs:
    """Return random ids, and a mask that omits some of them."""
    generator = np.random.default_rng(seed)
    mask = generator.integers(0, 2, (rows, length))
    mask[:, 0] = 1
    return {"ids": generator.integers(0, 100, (rows, length)), "mask": mask}


def ask(address: str, sent: Sequence[Inputs]) -> list[InferenceResult]:
    """Return the answers to requests that are in progress at the same time."""
    with InferenceClient(address) as client:
        futures = [
            client.submit("masked", inputs, request_id=str(number), parameters={"explain": True}, timeout=60)
            for number, inputs in enumerate(sent)
        ]
        return [future.result(60) for future in futures]


def test_lengths_share_batches_and_answers_are_those_alone(serve: Serve, masked_model: Path) -> None:
    server = serve(masked_model, *OPTIONS, "--max-batch-size", SIZE, "--max-queue-delay-ms", 600_000)
    assert server.ready["models"][0]["batching"].endswith("), padded along 'sequence' to 8, 16, 32")
    # Four rows of each length, so that every padded length has full batches. Longer ones are not
    # padded, and fill a batch alone.
    lengths = [length for length in range(3, 33) for _ in range(4)]
    np.random.default_rng(1).shuffle(lengths)
    sent = [text(length, 1, seed) for seed, length in enumerate(lengths)]
    sent += [text(length, SIZE, length) for length in range(33, 41)]
    results = ask(server.address, sent)

    session = onnxruntime.InferenceSession(str(masked_model), providers=["CPUExecutionProvider"])
    shared: dict[int, set[int]] = defaultdict(set)
    padded: dict[int, Any] = {}
    for number, (inputs, result) in enumerate(zip(sent, results, strict=True)):
        assert result.id == str(number)
        tokens, mean = session.run(["tokens", "mean"], inputs)
        np.testing.assert_array_equal(result["tokens"], tokens)
        np.testing.assert_allclose(result["mean"], mean, rtol=1e-5, atol=1e-6)
        length = inputs["ids"].shape[1]
        assert result.parameters["batch_rows"] == SIZE
        batch = int(result.parameters["batch_number"])
        shared[batch].add(length)
        padded[batch] = result.parameters.get("padded_length")
    # 15 full batches of the 120 single rows, and 8 of the rows beyond the longest length.
    assert len(shared) == 15 + 8
    assert max(map(len, shared.values())) > 1
    # To the eighth of a length that holds the longest row.
    for batch, together in shared.items():
        longest = max(together)
        step = min((length // 8 for length in PADDED_LENGTHS if length >= longest), default=None)
        assert padded[batch] == (None if step is None else -(-longest // step) * step)
    # A request that is cut up is padded in each of its parts.
    long = text(5, 3 * SIZE, seed=1)
    np.testing.assert_array_equal(ask(server.address, [long])[0]["tokens"], session.run(["tokens"], long)[0])
