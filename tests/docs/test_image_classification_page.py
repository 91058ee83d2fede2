"""docs/guides/image_classification.md is followed from top to bottom: each server that it starts, and what it asks them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from docs.conftest import Place, serving
from docs.pages import ROOT, Block, Command
from docs.running import check_pip, follow, parts
from support.models.small import written

PAGE = "docs/guides/image_classification.md"

pytestmark = pytest.mark.skipif(
    find_spec("PIL") is None and not os.environ.get("CI"), reason="needs the package Pillow"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A reader's directory, with two photos, and with a model and labels in place of those of ImageNet."""
    from PIL import Image

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    colours = np.random.default_rng(1).integers(0, 255, (15, 20, 3), np.uint8)
    Image.fromarray(colours).resize((640, 480)).save(tmp_path / "photo.jpg")
    Image.fromarray(255 - colours).resize((640, 480)).save(tmp_path / "other.jpg")
    (tmp_path / "labels.txt").write_text("".join(f"class {number}\n" for number in range(1000)))
    weights = np.random.default_rng(2).normal(0, 1, (3, 1000)).astype(np.float32)
    text = """(float[batch, 3, 224, 224] x) => (float[batch, 1000] logits) {
        mean = GlobalAveragePool (x) colour = Flatten (mean) logits = MatMul (colour, weights)
    }"""
    written(tmp_path / "resnet50.onnx", text, weights=weights)
    return tmp_path


@pytest.mark.timeout(300)
def test_the_page(directory: Path) -> None:
    started = 0
    place: Place | None = None
    with ExitStack() as stack:
        for part in parts(PAGE):
            if isinstance(part, Command) and part.words[:2] == ["tensorferry", "serve"]:
                stack.close()
                place = stack.enter_context(serving(directory, *part.words[2:]))
                started += 1
            elif part.text.startswith("# app.py\n"):
                (directory / "app.py").write_text(part.text)
            elif isinstance(part, Command) and part.words[0] == "pip":
                check_pip(part)
            else:
                assert place is not None
                if isinstance(part, Block) or place.has(part.words[0]) or "CI" in os.environ:
                    follow(part, place)
    assert started == 3
