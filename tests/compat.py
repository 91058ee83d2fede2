"""`make compat`: the server's and the end-to-end tests of the lane, with the oldest versions that are supported.

It is run by the environment of requirements/oldest.lock, and fails if another one has got in.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = ("grpcio", "protobuf", "numpy", "onnxruntime")

# What is about versions of nothing, or takes long and is about none of these; and FP16: the converter of the oldest
# ONNX Runtime makes a file that is none where what gives an output stays in FP32, which the server says.
LEFT_OUT = (
    "test_conservation",
    "test_the_demo",
    "test_load.py",
    "test_option_conflicts",
    "test_configured",
    "test_show_config",
    "test_padding",
    "test_loader",
    "test_fp16",
)


def main() -> int:
    """0 when the tests pass with just these versions."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements" / "oldest.in").read_text(), re.M))
    installed = {name: version(name) for name in OLDEST}
    print("compat:", ", ".join(f"{name} {installed[name]}" for name in OLDEST))
    wrong = [name for name in OLDEST if installed[name] != pins[name]]
    if wrong:
        print(f"compat: requirements/oldest.in has other versions of {', '.join(wrong)}")
        return 1
    # It needs packages which these versions are too old for.
    ignored = "--ignore=tests/e2e/test_otel_export.py"
    chosen = ["tests/server", "tests/e2e", ignored, "-k", " and ".join(f"not {name}" for name in LEFT_OUT)]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *chosen], cwd=ROOT, env={**os.environ, "TRANSPORTS": "lane"}
    )
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
