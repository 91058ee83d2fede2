"""Programs that `make tools` installs for these tests, beside the packages of the environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

CLIENTS = Path(sys.prefix) / "clients"
CURL = Path(shutil.which("curl") or "curl")


def needs(*files: Path) -> pytest.MarkDecorator:
    """Skip the test if one of these is not installed; in CI that is an error."""
    missing = [str(file) for file in files if not file.exists()]
    return pytest.mark.skipif(
        bool(missing) and not os.environ.get("CI"), reason=f"{missing} not installed: make tools installs it"
    )


def report_of(*command: object, tensors: Mapping[str, Any]) -> Any:
    """Return the JSON that a program prints, which reads the tensors to send as JSON."""
    ended = subprocess.run(
        list(map(str, command)), input=json.dumps(tensors), capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
