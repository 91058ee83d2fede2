"""Removal of temporary directories, also after the process was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tensorferry.server.errors import StartError
from tensorferry.server.models.repository.model_updates import UploadedFiles
from tensorferry.server.system.scratch_directory import ScratchDirectory, remove_abandoned

_OTHER_PROCESS = """
import sys
sys.path[:0] = {path!r}
from tensorferry.server.models.repository.model_updates import UploadedFiles
files = UploadedFiles("m", {{"1/model.onnx": b"uploaded"}})
print(files.directory, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_removed_with_its_last_reference(folder: Path) -> None:
    files = UploadedFiles("m", {"1/model.onnx": b"uploaded"})
    assert (files.directory / "m/1/model.onnx").read_bytes() == b"uploaded"
    del files
    assert list(folder.iterdir()) == []


def test_only_directories_of_killed_processes_are_removed(folder: Path) -> None:
    mine = ScratchDirectory()
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER_PROCESS.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        remove_abandoned()
        assert theirs.is_dir()
        assert mine.path.is_dir()
        other.send_signal(signal.SIGKILL)
    assert (theirs / "m/1/model.onnx").is_file()
    remove_abandoned()
    assert not theirs.exists()
    assert mine.path.is_dir()


def test_a_machine_without_temporary_files_is_a_start_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(folder / "missing")])
    with pytest.raises(StartError, match=r"missing'.*set TMPDIR"):
        remove_abandoned()


def test_other_directories_are_kept(folder: Path) -> None:
    (folder / "tensorferry-mine").mkdir()
    (folder / "other").mkdir()
    (folder / "other/.lock").touch()
    remove_abandoned()
    assert {path.name for path in folder.iterdir()} == {"tensorferry-mine", "other"}
