"""The wheel and the sdist, installed into an empty environment of each Python that this machine has:
the base install is a client, the extra `cpu` a server, and both stay small.
"""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from installs.environments import LIMITS, MODEL, ROOT, check, environment, interpreter, sizes

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]


@pytest.fixture(scope="module", params=PYTHONS)
def python(request: pytest.FixtureRequest) -> Path:
    found = interpreter(request.param)
    if found is None:
        pytest.skip(f"this machine has no Python {request.param}")
    return found


def command(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command in the environment's folder, where nothing of the checkout is imported."""
    return subprocess.run(
        [str(python.with_name("tensorferry")), *arguments],
        cwd=python.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


def check_size(python: Path, extra: str) -> None:
    size = sizes(python)
    largest = ", ".join(f"{name} {number / 1e6:.1f}" for name, number in size.most_common(6))
    text = f"tensorferry{extra}: {size.total() / 1e6:.1f} MB with bytecode; largest: {largest}"
    print(text)
    assert size.total() <= LIMITS[extra], text


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_install_is_a_client_or_a_server(kind: str, python: Path, dist: Path, tmp_path: Path) -> None:
    (built,) = dist.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    client = environment(tmp_path / "client", python, f"tensorferry @ {built.as_uri()}")
    server = environment(tmp_path / "server", python, f"tensorferry[cpu] @ {built.as_uri()}")
    check_size(client, "")
    check_size(server, "[cpu]")

    for installed in (client, server):
        assert command(installed, "--version").stdout == f"tensorferry {PROJECT['version']}\n"
    refused = command(client, "serve", str(MODEL))
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr

    # The server answers its own client, and the command of the base install.
    check(server, tmp_path, "lane", client.with_name("tensorferry"))
