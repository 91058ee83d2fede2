"""docling's object detection and OCR, unchanged and in their own environment, against a real server.

The OCR model is the app of docs/guides/applications.md, with a stand-in for RapidOCR.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs.pages import blocks
from support.models.small import written
from support.processes.server import running
from support.wire.programs import CLIENTS, needs, report_of

PYTHON = CLIENTS / "docling" / "bin" / "python"
CLIENT = Path(__file__).resolve().parents[1] / "support" / "wire" / "docling_client.py"
pytestmark = needs(CLIENTS / "docling" / ".done")

# The size and the colour of each page.
PAGES = [((40, 20), (255, 102, 0)), ((10, 30), (51, 153, 204)), ((16, 16), (0, 0, 0))]
# The boxes of the layout model, as parts of the page.
PARTS = np.array([[0, 0, 0.5, 0.5], [0.25, 0.5, 0.75, 1], [0, 0, 1, 1]], np.float32)

# A page that is not black has one line: its colour, in RapidOCR's order of blue, green and red.
RAPIDOCR = """
from types import SimpleNamespace
import numpy as np
class RapidOCR:
    def __call__(self, image):
        if not image.any():
            return SimpleNamespace(boxes=None, txts=None, scores=None)
        height, width, _ = image.shape
        corners = np.array([[[1, 2], [width, 2], [width, height], [1, height]]], float)
        return SimpleNamespace(boxes=corners, txts=("zwölf %s" % image[0, 0].tolist(),), scores=(0.75,))
"""


def layout_model(path: Path) -> Path:
    """Return a model with the tensors of Layout Heron. Its scores are the means of the colours, its labels ten times these."""
    text = """(float[batch, 3, 8, 8] images, int64[batch, 2] orig_target_sizes)
        => (int64[batch, 3] labels, float[batch, 3, 4] boxes, float[batch, 3] scores) {
        scores = ReduceMean <axes = [2, 3], keepdims = 0> (images)
        tens = Mul (scores, ten)
        rounded = Round (tens)
        labels = Cast <to = 7> (rounded)
        size = Cast <to = 1> (orig_target_sizes)
        corner = Concat <axis = 1> (size, size)
        page = Unsqueeze (corner, one)
        boxes = Mul (page, parts)
    }"""
    return written(path, text, ten=np.float32(10), one=np.array([1]), parts=PARTS[None])


@pytest.fixture(scope="module")
def report(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the client's report."""
    folder = tmp_path_factory.mktemp("docling")
    layout = layout_model(folder / "docling-project--docling-layout-heron.onnx")
    (app,) = (b.text for b in blocks() if b.page.endswith("applications.md") and "# app.py" in b.text)
    (folder / "app.py").write_text(app)
    (folder / "rapidocr.py").write_text(RAPIDOCR)
    arguments = (layout, folder / "app.py", "--http-port", "0")
    with running(*arguments, transport=transport, variables={"PYTHONPATH": str(folder)}) as server:
        return report_of(PYTHON, CLIENT, server.address, server.ready["http"], tensors={"pages": PAGES})


def test_layout(report: Any) -> None:
    """docling leaves out scores below 0.3."""
    assert len(report) == 6
    for form, answers in report.items():
        for ((width, height), colour), (labels, scores, boxes) in zip(PAGES, answers["layout"], strict=True):
            means = np.array(colour, np.float32) / 255
            kept = means >= 0.3
            assert labels == np.round(10 * means[kept]).tolist(), form
            np.testing.assert_allclose(scores, means[kept], rtol=1e-6, err_msg=form)
            expected = PARTS[kept] * [width, height, width, height]
            np.testing.assert_allclose(np.reshape(boxes, (-1, 4)), expected, err_msg=form)


def test_ocr(report: Any) -> None:
    """The last page has no text, so each output is empty."""
    expected = [
        [[[f"zwölf {[*reversed(colour)]}", 0.75, 1, 2, width, height]], []]
        for (width, height), colour in PAGES[:-1]
    ]
    for form, answers in report.items():
        assert answers["ocr"] == [*expected, [[], []]], form
