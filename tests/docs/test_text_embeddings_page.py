"""docs/guides/text_embeddings.md is followed with a small encoder; tests/e2e/examples/test_embeddings.py has the real one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from docs.conftest import Place, serving
from docs.pages import ROOT, Block, Command
from docs.running import PYTHON, execute, follow, parts
from support.models import sentence_encoder
from support.remote.hub import FakeHub
from support.remote.web_server import web_server

from tensorferry.client import InferenceClient

PAGE = "docs/guides/text_embeddings.md"
(APP,) = (b for b in PYTHON if b.page == PAGE and b.text.startswith("# app.py\n"))
PARTS = [part for part in parts(PAGE) if part != APP]
# Small batches take less time to check and to warm up.
SMALL = ("--max-batch-size", "8")
TEXTS = ["A man is eating food.", "", "the man is riding a horse " * 20]

pytestmark = pytest.mark.skipif(
    find_spec("tokenizers") is None and not os.environ.get("CI"),
    reason="needs the package tokenizers: make embeddings installs it",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the example, as after `make embeddings`."""
    directory = tmp_path_factory.mktemp("embeddings")
    example = directory / "examples" / "embeddings"
    sentence_encoder.build(example / "model")
    shutil.copy(ROOT / "examples" / "embeddings" / "app.py", example)
    (directory / "app.py").write_text(APP.text)
    return directory


@pytest.fixture(scope="module")
def example(directory: Path) -> Iterator[Place]:
    with serving(directory, "examples/embeddings/app.py", *SMALL) as place:
        yield place


@pytest.fixture
def hub(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub on this machine, which servers use, with the example's files; the encoder is without pooling."""
    built = directory / "examples" / "embeddings" / "model"
    encoder = sentence_encoder.without_pooling(onnx.load(built / "minilm.onnx"))
    files = {
        "tokenizer.json": (built / "tokenizer.json").read_bytes(),
        "onnx/model.onnx": encoder.SerializeToString(),
    }
    with web_server(None) as web:
        hub = FakeHub(web)
        hub.commit("sentence-transformers/all-MiniLM-L6-v2", files)
        monkeypatch.setenv("HF_ENDPOINT", web.url)
        monkeypatch.setenv("HF_HOME", str(directory / "hf"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield hub


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.place)
def test_the_page(part: Command | Block, example: Place) -> None:
    """Follow the page. What its blocks print is that of the real encoder."""
    if isinstance(part, Command):
        follow(part, example)
    else:
        execute(replace(part, text=re.sub(r"(print\(.*\))  # .*", r"\1", part.text)), example)


def test_the_encoder_of_the_page_pools_as_the_example_does(example: Place, hub: FakeHub) -> None:
    given = {"text": np.array(TEXTS, object)}
    with (
        serving(example.directory, "app.py", *SMALL) as own,
        InferenceClient(own.server.address) as client,
        InferenceClient(example.server.address) as other,
    ):
        vectors = client.infer("embed", given)["embedding"]
        np.testing.assert_allclose(vectors, other.infer("embed", given)["embedding"], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert not np.allclose(vectors[0], vectors[2], atol=0.01)
    assert not [line for line in own.server.log if "Warning" in line]
