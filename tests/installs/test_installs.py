"""The server starts and answers beside other packages, in either order of installation, with every
allowed protobuf.

Each case is an environment made by uv from the packages available today: `make test-installs`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from installs.environments import MODEL, check, uv

OURS = "tensorferry[cpu]"
TRITON = "tritonclient[grpc]"

# Packages to install, one command after the other. tritonclient requires protobuf below 7.
CASES: dict[str, list[list[str]]] = {
    "the newest of all": [[OURS]],
    "tritonclient later": [[OURS], [TRITON]],
    "tritonclient first": [[TRITON], [OURS]],
    "protobuf 7": [[OURS, "protobuf==7.*"]],
    "protobuf 6": [[OURS, "protobuf==6.*"]],
    "the oldest protobuf and grpcio": [[OURS, "protobuf==5.29.1", "grpcio==1.71.2"]],
    "grpcio's services beside it": [[OURS], ["grpcio-health-checking", "grpcio-reflection", "grpcio-status"]],
    # grpcio-health-checking, whose code needs protobuf 7, cannot be imported afterwards. The server
    # does not import it.
    "tritonclient after grpcio's services": [[OURS, "grpcio-health-checking"], [TRITON]],
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_the_server_starts_and_answers(case: str, wheel: Path, tmp_path: Path) -> None:
    uv("venv", "--python", sys.executable, tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    for packages in CASES[case]:
        given = [package.replace(OURS, f"{OURS} @ {wheel.as_uri()}") for package in packages]
        uv("pip", "install", "--python", python, *given)
    for transport in ("lane", "threaded"):
        check(python, tmp_path, transport)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("old", ["protobuf==4.25.8", "grpcio==1.65.5"])
def test_a_version_that_cannot_work_is_named_in_one_line(old: str, wheel: Path, tmp_path: Path) -> None:
    """pip installs what another package requires, even if it conflicts with tensorferry; the server
    then names the package.
    """
    uv("venv", "--python", sys.executable, tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    for given in (f"{OURS} @ {wheel.as_uri()}", old):
        uv("pip", "install", "--python", python, given)
    ended = subprocess.run(
        [str(python), "-m", "tensorferry.server", "serve", str(MODEL), "--port", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    name, _, version = old.partition("==")
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        f"tensorferry serve: {name} {version} is installed, which does not work: pip install '{name}"
    )
    assert ended.stderr.count("\n") == 1
