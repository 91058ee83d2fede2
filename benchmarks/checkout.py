"""Use of this checkout where the project is not installed."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

_ROOT = Path(__file__).resolve().parents[1]


def use_this_checkout() -> None:
    """Make the benchmarks importable, here and in child processes; and the checkout if nothing is installed."""
    folders = [_ROOT / "benchmarks"]
    if find_spec("tensorferry") is None:
        folders += [*(_ROOT / name for name in ("protos", "batcher", "server", "client")), _version_folder()]
    found = [str(folder) for folder in folders]
    sys.path[:0] = found
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, *([inherited] if inherited else [])])


def _version_folder() -> Path:
    """Create a folder that states the version like an installation, because the server asks for it."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    folder = Path(mkdtemp(prefix="tf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    metadata = folder / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir()
    lines = ("Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}", "")
    (metadata / "METADATA").write_text("\n".join(lines))
    return folder
