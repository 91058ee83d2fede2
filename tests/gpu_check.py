"""`make gpu-check`: the end-to-end tests on CUDA, and CUDA against the CPU, on a GPU machine.

On a machine without one it says that it checked nothing, and exits with 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from e2e import models  # noqa: E402 (the tests' folder is put on the path above)

from tensorferry.server.devices import choose_device  # noqa: E402
from tensorferry.server.errors import StartError  # noqa: E402
from tensorferry.server.proof import sample  # noqa: E402
from tensorferry.server.session import Session  # noqa: E402


def compare(path: Path, size: int = 16) -> float:
    """The greatest difference of the outputs on CUDA and on the CPU, relative to their magnitude."""
    on_cpu, on_cuda = Session(path, "cpu"), Session(path, "cuda:0")
    worst = 0.0
    for rows in (1, 2, 7, 32):
        inputs = sample(on_cpu.signature, rows, size, seed=rows)
        expected, got = on_cpu.run(inputs), on_cuda.run(inputs)
        for name, array in expected.items():
            a, b = array.astype(np.float64), got[name].astype(np.float64)
            worst = max(worst, float(np.abs(a - b).max()) / max(float(np.abs(a).max()), 1e-6))
    return worst


def main() -> int:
    """0 when everything agrees, or there is no GPU; 1 otherwise."""
    try:
        device = choose_device("cuda")
    except StartError as error:
        print(f"gpu-check: NOTHING WAS CHECKED on a GPU: {error}")
        return 0
    print(f"gpu-check: on {device}")
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            HERE.parent / "examples" / "digits" / "digits.onnx",
            models.probe(Path(folder) / "probe.onnx"),
            models.mixing(Path(folder) / "mixing.onnx"),
        ]
        differences = {path.stem: compare(path) for path in paths}
    for name, difference in differences.items():
        print(f"gpu-check: {name}: CUDA differs from CPU by {difference:.2e} of the outputs' magnitude")
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/e2e", "tests/wire"],
        cwd=HERE.parent,
        env={**os.environ, "TENSORFERRY_DEVICE": "cuda"},
    )
    agree = all(difference < 1e-3 for difference in differences.values())
    return 0 if agree and tests.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
