"""The demo model and the demo do what its README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from support.processes.server import ServerProcess, environment

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits"


def test_the_accuracy_in_the_readme_is_true() -> None:
    heldout = np.load(DIGITS / "heldout.npz")
    session = onnxruntime.InferenceSession(str(DIGITS / "digits.onnx"), providers=["CPUExecutionProvider"])
    (labels,) = session.run(["label"], {"image": heldout["images"]})
    right = int((labels == heldout["labels"]).sum())
    assert f"{right} of {len(labels)} held-out images" in (DIGITS / "README.md").read_text()
    assert right / len(labels) > 0.97


def demo(port: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DIGITS / "demo.py"), "--once", "--port", port, "--device", "cpu"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )


def test_the_demo_shows_answers_and_stops() -> None:
    result = demo("0")
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert "ready on 127.0.0.1:" in result.stdout
    assert len(re.findall(r"\d \(\d+%", result.stdout)) == 12
    right = re.search(r"(\d+) of 12 right", result.stdout)
    assert right is not None
    assert int(right[1]) >= 9


def test_the_demo_says_when_its_port_is_taken(plain: ServerProcess) -> None:
    port = plain.address.rpartition(":")[2]
    result = demo(port)
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
