"""The wheel and the sdist: four typed packages in one namespace, with all that they need, under one version."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from support.wire.programs import CLIENTS, needs

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("protos", "batcher", "server", "client")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
RELEASE_NOTES = ROOT / "deploy" / "release" / "release_notes.py"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> dict[str, bytes]:
    """The names and contents of the wheel's files."""
    (built,) = dist.glob("tensorferry-*.whl")
    with zipfile.ZipFile(built) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def metadata(wheel: dict[str, bytes]) -> Message:
    (content,) = (content for name, content in wheel.items() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(content.decode())


def test_the_namespace_has_no_init_which_would_hide_the_other_packages() -> None:
    for package in PACKAGES:
        assert not (ROOT / package / "tensorferry" / "__init__.py").exists()
        assert not (ROOT / package / "__init__.py").exists()
        assert (ROOT / package / "tensorferry" / package / "py.typed").exists()


def test_the_wheel_has_every_module_and_the_command(wheel: dict[str, bytes]) -> None:
    for package in PACKAGES:
        folder = ROOT / package
        for file in (folder / "tensorferry" / package).rglob("*"):
            if file.suffix in (".py", ".pyi", ".proto", ".typed", ".html"):
                assert str(file.relative_to(folder)) in wheel
    assert "tensorferry/server/observability/monitoring/status.html" in wheel
    (entry_points,) = (content for name, content in wheel.items() if name.endswith("entry_points.txt"))
    assert b"tensorferry = tensorferry.server.__main__:main" in entry_points


def test_the_wheel_has_nothing_but_the_packages(wheel: dict[str, bytes]) -> None:
    tops = {tuple(name.split("/")[:2]) for name in wheel if not name.startswith(f"tensorferry-{VERSION}.")}
    assert tops == {("tensorferry", package) for package in (*PACKAGES, "serving")}
    assert not [name for name in wheel if name.endswith(".pyc")]


def test_the_sdist_has_every_file_of_the_repository(dist: Path) -> None:
    """The sdist suffices to build, test and deploy; it lacks only the files of CI and git."""
    (built,) = dist.glob("tensorferry-*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.split("\0") if name and not name.startswith(".")}
    assert tracked - names == set()
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]


def test_the_metadata_is_complete(metadata: Message) -> None:
    assert metadata["Name"] == "tensorferry"
    assert metadata["Version"] == VERSION
    assert metadata["Summary"] == PROJECT["description"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Keywords"]
    classifiers = metadata.get_all("Classifier", [])
    assert [name for name in classifiers if name.startswith("Development Status ::")]
    pythons = [name.rpartition(" ")[2] for name in classifiers if re.search(r"Python :: 3\.\d+$", name)]
    assert metadata["Requires-Python"] == f">={pythons[0]}"
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


@needs(CLIENTS / "release" / ".done")
def test_the_files_pass_the_check_of_a_package_index(dist: Path) -> None:
    checked = subprocess.run(
        [CLIENTS / "release" / "bin" / "python", "-m", "twine", "check", "--strict", *dist.iterdir()],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count("PASSED") == 2


def test_the_version_is_written_once_in_the_sources() -> None:
    """Modules get it from the installed package's metadata."""
    for package in PACKAGES:
        for module in (ROOT / package).rglob("*.py"):
            assert VERSION not in module.read_text(), module


def test_deployments_and_their_documentation_name_images_of_this_version() -> None:
    named = 0
    for folder in ("deploy", "docs"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".md", ".yaml", "") and file.is_file():
                tags = re.findall(r"(?:tensorferry:|newTag: )(\S+)-(?:cpu|cuda)\b", file.read_text())
                assert set(tags) <= {VERSION}, file
                named += len(tags)
    assert named >= 6


def test_the_command_prints_the_version() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tensorferry.server", "--version"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == f"tensorferry {VERSION}\n"


def release_notes(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, RELEASE_NOTES, *arguments], capture_output=True, text=True)


def test_this_version_has_release_notes() -> None:
    notes = release_notes()
    assert notes.returncode == 0, notes.stderr
    assert notes.stdout == release_notes(VERSION).stdout
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert notes.stdout.strip() in changelog.partition(f"\n## [{VERSION}] - ")[2]
    assert "\n## [" not in notes.stdout


def test_changes_since_the_last_version_have_notes_of_their_own() -> None:
    assert release_notes("Unreleased").stdout != release_notes().stdout


def test_a_version_without_notes_is_an_error_in_one_line() -> None:
    notes = release_notes("99.0")
    assert notes.returncode == 1
    assert notes.stdout == ""
    assert notes.stderr.startswith("CHANGELOG.md has no section '99.0', only ")
    assert notes.stderr.count("\n") == 1


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
