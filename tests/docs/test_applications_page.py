"""docs/guides/applications.md: docling's options are accepted, and frigate's plugin calls a server.

tests/wire/test_docling.py serves the page's app to docling.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from docs.pages import Command
from docs.running import BLOCKS, COMMANDS, check_pip, check_serve
from support.models.small import written
from support.processes.server import running
from support.wire.programs import CLIENTS, needs, report_of

PAGE = "docs/guides/applications.md"
OPTIONS, APP, PLUGIN = (b.text for b in BLOCKS if b.page == PAGE and b.language == "python")
(CONFIGURATION,) = (b.text for b in BLOCKS if b.page == PAGE and b.language == "yaml")

# The fields of the options that the page has.
FIELDS = ("url", "transport", "model_name", "model_version", "grpc_metadata", "headers", "grpc_max_message_bytes",
          "use_binary_data", "timeout")  # fmt: skip
ANSWER = np.arange(120, dtype=np.float32).reshape(20, 6)


class DetectionApi:
    """The constructor of frigate's class of this name, in 0.17.2."""

    def __init__(self, detector_config: Any) -> None:
        self.detector_config = detector_config
        self.height, self.width = detector_config.model.height, detector_config.model.width


@pytest.fixture
def processed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put stand-ins in place of frigate's modules, and return the arguments of its post-processing."""
    calls: list[Any] = []

    def post_process_yolo(*arguments: Any) -> Any:
        calls.append(arguments)
        return ANSWER

    for name, member, value in (
        ("frigate.detectors.detection_api", "DetectionApi", DetectionApi),
        ("frigate.detectors.detector_config", "BaseDetectorConfig", object),
        ("frigate.util.model", "post_process_yolo", post_process_yolo),
    ):
        module = ModuleType(name)
        setattr(module, member, value)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.page == PAGE], ids=str)
def test_command(command: Command, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    if command.words[0] == "pip":
        check_pip(command)
    else:
        check_serve(command, tmp_path)


@needs(CLIENTS / "docling" / ".done")
def test_doclings_options_and_their_defaults() -> None:
    shown = "import json; both = [options.layout_options.engine_options, options.ocr_options]"
    shown += f"; print(json.dumps([[getattr(one, name) for name in {FIELDS}] for one in both]))"
    python = CLIENTS / "docling" / "bin" / "python"
    layout, ocr = report_of(python, "-c", f"{OPTIONS}\n{shown}", tensors={})
    defaults: list[Any] = [None, {}, {}, 64 << 20, True, 60]
    assert layout == ["127.0.0.1:8001", "grpc", None, *defaults]
    assert ocr == ["127.0.0.1:8001", "grpc", "ocr", *defaults]


def test_frigates_plugin(tmp_path: Path, processed: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """A frame's predictions are post-processed by frigate. Without a server there are no detections, and a log line."""
    table = np.random.default_rng(1).random((1, 84, 5), np.float32)
    text = """(float[batch, 3, 320, 320] images) => (float[batch, 84, 5] output0) {
        mean = ReduceMean <axes = [1, 2, 3], keepdims = 1> (images) one = Squeeze (mean, last) output0 = Mul (table, one)
    }"""
    model = written(tmp_path / "yolov9-t-320.onnx", text, table=table, last=np.array([3]))
    names: dict[str, Any] = {"__name__": "oip"}
    exec(compile(PLUGIN, "oip.py", "exec"), names)
    assert f"type: {names['OipDetector'].type_key}\n" in CONFIGURATION
    assert f"model_name: {model.stem}\n" in CONFIGURATION
    frame = np.full((1, 320, 320, 3), 0.5, np.float32).transpose(0, 3, 1, 2)
    with running(model, transport="lane") as server:
        config = SimpleNamespace(
            type="oip", url=server.address, model_name=model.stem, timeout=names["OipDetectorConfig"].timeout,
            model=SimpleNamespace(width=320, height=320),
        )  # fmt: skip
        detector = names["OipDetector"](config)
        assert detector.detect_raw(frame) is ANSWER
    ((outputs, width, height),) = processed
    np.testing.assert_allclose(outputs, [table / 2], rtol=1e-5)
    assert (width, height) == (320, 320)
    assert not np.any(detector.detect_raw(frame))
    assert "no detections: " in caplog.text
    detector.client.close()
