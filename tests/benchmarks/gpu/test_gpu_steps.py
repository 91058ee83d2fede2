"""The benchmark of the steps to a device and back runs without one, and says what is missing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.models import small

from gpu import steps


def test_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small.mlp(tmp_path / "m.onnx")
    assert steps.main([str(path), "--device", "cpu", "--rows", "1,3", "--runs", "2", "--rounds", "2"]) == 0
    title, missing, header, *table = capsys.readouterr().out.splitlines()
    assert title.endswith("m.onnx on cpu; milliseconds, medians of 2 rounds of 2 batches")
    assert missing == "not measured: graphs: nothing to capture on the CPU"
    assert header.split() == ["rows", "way", "one", "two"]
    assert [line.split()[:2] for line in table] == [
        [rows, way] for rows in ("1", "3") for way in ("plain", "bound", "staged")
    ]


def test_a_model_with_strings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.main([str(small.echo(tmp_path / "m.onnx", "BYTES")), "--device", "cpu"]) == 2
    assert "has strings" in capsys.readouterr().err


@pytest.mark.parametrize("datatype", ["FP32", "BF16"])
def test_every_way_gives_the_same_answers(datatype: str, tmp_path: Path) -> None:
    path = small.echo(tmp_path / "m.onnx", datatype)
    found, requests, _ = steps.ways(path, "cpu", [3], 2)
    answers = []
    for way in found.values():
        outputs: Any = way(requests, threading.Lock())
        (array,) = outputs.values() if isinstance(outputs, dict) else outputs
        answers.append(array.tobytes())
    assert set(answers) == {b"".join(request.tensors[0].data.tobytes() for request in requests)}


def test_the_models_of_the_benchmark_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORFERRY_BENCH", str(tmp_path))
    words = ["resnet", "--device", "cpu", "--rows", "2", "--runs", "1", "--rounds", "1"]
    assert steps.main(words) == 0
    assert "staged" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["gpu-resnet-small.onnx"]
