"""`make compat`: tests of the lane with the oldest supported versions.

It runs in the environment of requirements/oldest.lock, and fails if another version is installed.
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

# Tests that do not depend on versions, or that are slow; FP16, because the converter of the oldest
# ONNX Runtime writes an invalid file if an output stays in FP32, which the server reports;
# verdicts of models that newer exporters made, which it does not load; graphs with operators and
# overloads of functions that it lacks; and an asyncio client of a server that is killed, because the
# oldest grpcio sometimes notices that only at the deadline.
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
    "test_custom_operators_stay_in_fp32",
    "test_the_verdicts_are_the_servers",
    "test_computed_numbers",
    "test_asyncio_loses_no_call_when_a_server_is_killed",
)

# These need packages that the environment lacks. Most have dependencies of newer versions.
NEED_OTHER_PACKAGES = (
    "tests/e2e/models/test_custom_operators.py",
    "tests/e2e/examples/test_embeddings.py",
    "tests/e2e/examples/test_images.py",
    "tests/e2e/test_otel_export.py",
    "tests/e2e/models/test_remote_models.py",
    "tests/server/models/remote",
    # httptools.
    "tests/server/transport/http/test_heads.py",
)


def main() -> int:
    """Return 0 if the tests pass with exactly these versions."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements" / "oldest.in").read_text(), re.M))
    installed = {name: version(name) for name in OLDEST}
    print("compat:", ", ".join(f"{name} {installed[name]}" for name in OLDEST))
    wrong = [name for name in OLDEST if installed[name] != pins[name]]
    if wrong:
        print(f"compat: requirements/oldest.in has other versions of {', '.join(wrong)}")
        return 1
    ignored = [f"--ignore={path}" for path in NEED_OTHER_PACKAGES]
    chosen = [
        "tests/server",
        "tests/e2e",
        "tests/client/test_stream.py",
        *ignored,
        "-k",
        " and ".join(f"not {name}" for name in LEFT_OUT),
    ]
    processes = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *processes, *chosen],
        cwd=ROOT,
        env={**os.environ, "TRANSPORTS": "lane"},
    )
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
