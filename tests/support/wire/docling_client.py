"""docling's client of the protocol against a server, with a JSON report; test_docling.py runs it in docling's environment.

The arguments are the server's addresses of gRPC and of HTTP. stdin has the pages: the size and the colour of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from docling.datamodel.accelerator_options import AcceleratorOptions
from docling.datamodel.base_models import ConfidenceReport, Page, Size
from docling.datamodel.object_detection_engine_options import ApiKserveV2ObjectDetectionEngineOptions
from docling.datamodel.pipeline_options import KserveV2OcrOptions, LayoutObjectDetectionOptions, OcrMode
from docling.models.inference_engines.object_detection.base import ObjectDetectionEngineInput
from docling.models.inference_engines.object_detection.factory import create_object_detection_engine
from docling.models.stages.ocr.kserve_v2_ocr_model import KserveV2OcrModel
from PIL import Image


def pixels(images: list[Any], return_tensors: str) -> dict[str, Any]:
    """Return what the preprocessor of docling's model returns, of 8 × 8 pixels."""
    assert return_tensors == "np"
    resized = np.stack([np.asarray(image.resize((8, 8)), np.float32) for image in images])
    return {"pixel_values": resized.transpose(0, 3, 1, 2) / 255}


def layout(images: list[Any], **connection: Any) -> Any:
    """Return labels, scores and boxes of each image, from docling's engine."""
    engine_options = ApiKserveV2ObjectDetectionEngineOptions(**connection)
    options = LayoutObjectDetectionOptions.from_preset("layout_heron_default", engine_options=engine_options)
    engine: Any = create_object_detection_engine(
        options=options.engine_options,
        model_spec=options.model_spec,
        enable_remote_services=True,
        accelerator_options=AcceleratorOptions(),
    )
    # The engine loads these from a hub.
    engine._resolve_model_folder = lambda repo_id, revision: Path()
    engine._load_preprocessor = lambda folder: pixels
    engine._load_label_mapping = lambda folder: {}
    engine.initialize()
    found = engine.predict_batch([ObjectDetectionEngineInput(image=image) for image in images])
    engine.close()
    return [[page.label_ids, page.scores, page.bboxes] for page in found]


def ocr(image: Any, **connection: Any) -> Any:
    """Return texts, scores and boxes of a page, from docling's OCR stage, and its errors."""
    options = KserveV2OcrOptions(**connection, lang=["de"], mode=OcrMode.FULL_PAGE, scale=1.0)
    stage = KserveV2OcrModel(True, None, options, AcceleratorOptions(), enable_remote_services=True)
    page = Page(page_no=1, size=Size(width=image.width, height=image.height))
    page._backend = SimpleNamespace(is_valid=lambda: True, get_page_image=lambda scale, cropbox: image)
    document = SimpleNamespace(errors=[], confidence=ConfidenceReport())
    list(stage(document, [page]))
    stage.close()
    cells = page.parsed_page.textline_cells
    boxes = [[cell.text, cell.confidence, *cell.rect.to_bounding_box().as_tuple()] for cell in cells]
    return [boxes, [error.error_message for error in document.errors]]


def report(grpc: str, http: str, pages: list[Any]) -> dict[str, Any]:
    """Return everything that the tests check, for each form of the requests."""
    images = [Image.new("RGB", tuple(size), tuple(colour)) for size, colour in pages]
    return {
        f"{transport} {url} {binary}": {
            "layout": layout(images, url=url, transport=transport, use_binary_data=binary),
            "ocr": [ocr(image, url=url, transport=transport, use_binary_data=binary) for image in images],
        }
        for transport, url in [("grpc", grpc), ("grpc", f"dns:///{grpc}"), ("http", http)]
        for binary in (True, False)
    }


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], sys.argv[2], json.load(sys.stdin)["pages"])))
