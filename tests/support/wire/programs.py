"""Programs that `make tools` installs for these tests, beside the packages of the environment."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

CLIENTS = Path(sys.prefix) / "clients"
CURL = Path(shutil.which("curl") or "curl")


def needs(*files: Path) -> pytest.MarkDecorator:
    """Skip the test if one of these is not installed; in CI that is an error."""
    missing = [str(file) for file in files if not file.exists()]
    return pytest.mark.skipif(
        bool(missing) and not os.environ.get("CI"), reason=f"{missing} not installed: make tools installs it"
    )
