"""Environments made by uv, and the Python interpreters of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECK = Path(__file__).with_name("check.py")
MODEL = ROOT / "examples" / "digits" / "digits.onnx"
# Bytes that an install may take, by extra.
LIMITS = {"": 120_000_000, "[cpu]": 230_000_000}
# What an empty environment has. That of Python 3.11 also has setuptools.
_OF_VENV = {"pip", "setuptools", "pkg_resources", "_distutils_hack"}


def uv(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "uv", "--quiet", *map(str, arguments)], check=True, timeout=300)


def interpreter(version: str) -> Path | None:
    """Return the interpreter of a version such as "3.12", None if this machine has none.

    pyenv's commands fail for versions that it has but does not select, so its folder is searched, too.
    """
    for path in _candidates(version):
        found = subprocess.run(
            [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if found.returncode == 0 and found.stdout.strip() == version:
            return path
    return None


def _candidates(version: str) -> Iterator[Path]:
    if named := shutil.which(f"python{version}"):
        yield Path(named)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python"))


def environment(folder: Path, python: Path | str, *packages: str) -> Path:
    """Make an environment with packages, and return its interpreter."""
    uv("venv", "--python", python, folder)
    made = folder / "bin" / "python"
    # With bytecode, as pip installs.
    uv("pip", "install", "--compile-bytecode", "--python", made, *packages)
    return made


def sizes(python: Path) -> Counter[str]:
    """Return the bytes of each entry of an environment's site-packages that was installed into it."""
    (site,) = (python.parents[1] / "lib").glob("python*/site-packages")
    found: Counter[str] = Counter()
    for file in site.rglob("*"):
        top = file.relative_to(site).parts[0]
        if file.is_file() and top.partition("-")[0] not in _OF_VENV:
            found[top] += file.stat().st_size
    return found


def check(python: Path, folder: Path, transport: str, *clients: Path) -> None:
    """Serve the demo model with an environment, and call it.

    It runs in another folder, so that nothing of the checkout is imported.
    """
    checked = subprocess.run(
        [str(python), str(CHECK), str(MODEL), transport, *map(str, clients)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert checked.returncode == 0, checked.stderr
