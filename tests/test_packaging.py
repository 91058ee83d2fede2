"""The wheel: four typed packages in one namespace, with everything they need at run time."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("protos", "batcher", "server", "client")


def test_the_namespace_has_no_init_which_would_hide_the_other_packages() -> None:
    for package in PACKAGES:
        assert not (ROOT / package / "tensorferry" / "__init__.py").exists()
        assert not (ROOT / package / "__init__.py").exists()
        assert (ROOT / package / "tensorferry" / package / "py.typed").exists()


def test_the_wheel_has_every_module_and_the_command(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("tensorferry-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name) for name in names if name.endswith("entry_points.txt"))
    for package in PACKAGES:
        folder = ROOT / package
        for file in (folder / "tensorferry" / package).rglob("*"):
            if file.suffix in (".py", ".pyi", ".proto", ".typed", ".html"):
                assert str(file.relative_to(folder)) in names
    assert "tensorferry/server/monitoring/status.html" in names
    assert b"tensorferry = tensorferry.server.__main__:main" in entry_points


@pytest.mark.parametrize("module", ["tensorferry.client", "tensorferry.client.aio", "tensorferry.batcher"])
def test_client_and_batcher_need_no_server_package(module: str) -> None:
    script = (
        f"import sys, {module}\n"
        "wrong = [m for m in sys.modules if m.split('.')[0] == 'onnxruntime' or m == 'tensorferry.server']\n"
        "sys.exit(1 if wrong else 0)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "module", ["tensorferry.server.app", "tensorferry.server.transport.lane.lane", "tensorferry.client"]
)
def test_nothing_is_imported_whose_generated_code_wants_a_protobuf_of_its_own(module: str) -> None:
    """Such a package, installed beside one that pins an older protobuf, would keep the server from
    starting.
    """
    script = (
        f"import sys\n"
        f"for name in ('grpc_health', 'grpc_reflection', 'grpc_status', 'google.rpc'): sys.modules[name] = None\n"
        f"import {module}"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_no_lock_file_names_an_index() -> None:
    for lock in (ROOT / "requirements").glob("*.lock"):
        assert "://" not in lock.read_text()
