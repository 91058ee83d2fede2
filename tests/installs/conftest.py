from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from installs.environments import ROOT


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    targets = ("-t", "sdist", "-t", "wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *targets, "-d", str(folder)], cwd=ROOT, check=True
    )
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (built,) = dist.glob("*.whl")
    return built
