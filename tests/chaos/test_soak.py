"""A few seconds of `make soak`: every fault at once, and what must hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_a_short_soak_holds(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    words = ["-m", "chaos", "--minutes", "0.1", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "soak.json").read_text())
    assert record["ledger"]["sent"] > 0
    assert "| something was answered | yes |" in (tmp_path / "soak.md").read_text()
