"""Libraries with one custom operator, compiled from C, and models that use it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.models.small import node, save, value

DOMAIN = "com.acme"
_SOURCE = Path(__file__).with_suffix(".c")


def library(path: Path, name: str = "Twice", domain: str = DOMAIN, compute: str = "twice") -> Path:
    """Compile a library whose operator computes y = 2 x, or with `minus_mean` y = x - mean of all elements.

    The test is skipped if there is no compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("NO C compiler: custom operators of our own were not tested")
    path.parent.mkdir(parents=True, exist_ok=True)
    given = [f'-DNAME="{name}"', f'-DDOMAIN="{domain}"', f"-DCOMPUTE={compute}"]
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), *given, str(_SOURCE)], check=True)
    return path


def model(path: Path, name: str = "Twice", domain: str = DOMAIN) -> Path:
    """x FP32 [batch, 3] → y = operator(x + 1) + 1, FP32 [batch, 3]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return save(
        path,
        [node("Add", "x one", "a"), node(name, "a", "b", domain=domain), node("Add", "b one", "y")],
        [value("x")],
        [value("y")],
        {"one": np.ones(3, np.float32)},
    )
