"""promtool, built by `make tools`: it parses rules, queries and pages like Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

PROMTOOL = shutil.which("promtool", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")

# Without Go, as on a developer's machine, these tests are skipped; CI must run them.
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None and not os.environ.get("CI"), reason="promtool is not installed: make tools installs it"
)

_SECONDS = 110


def promtool(
    *words: str | Path, stdin: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it."""
    assert PROMTOOL is not None, "CI needs promtool: make tools"
    return subprocess.run(
        [PROMTOOL, *map(str, words)], input=stdin, capture_output=True, text=True, timeout=_SECONDS, cwd=cwd
    )


def check_expressions(folder: Path, expressions: Sequence[str]) -> str:
    """Return the errors of these expressions; "" if Prometheus can parse them all."""
    rules = [{"record": f"r{number}", "expr": expr} for number, expr in enumerate(expressions)]
    file = folder / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    checked = promtool("check", "rules", file)
    return "" if checked.returncode == 0 else checked.stdout + checked.stderr


def without_answer(
    folder: Path, expressions: Sequence[str], series: Sequence[tuple[str, Mapping[str, str]]]
) -> str:
    """Return the expressions that are empty though all these series exist; "" for none."""
    inputs = [
        {"series": f"{name}{{{_pairs(labels)}}}", "values": f"1+{number}x80"}
        for number, (name, labels) in enumerate(series, 1)
    ]
    asked = [
        {"expr": f"count({expr}) > bool 0", "eval_time": "15m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for expr in expressions
    ]
    test = {"interval": "15s", "input_series": inputs, "promql_expr_test": asked}
    file = folder / "test.json"
    file.write_text(json.dumps({"rule_files": [], "tests": [test]}))
    tested = promtool("test", "rules", file)
    return "" if tested.returncode == 0 else tested.stdout + tested.stderr


def _pairs(labels: Mapping[str, str]) -> str:
    everywhere = {"job": "tensorferry", "instance": "a", **labels}
    return ", ".join(f'{label}="{value}"' for label, value in everywhere.items())
