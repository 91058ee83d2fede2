"""Detection of every kind of file change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorferry.server.security.file_watch import FileWatch

LONG_AGO = 1_700_000_000


def settle(path: Path) -> None:
    os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.fixture(autouse=True)
def clock_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lead of the clock over the files' times, in nanoseconds. By default all files count as settled."""
    ahead = [3_600 * 10**9]
    real = FileWatch.changed.__globals__["time"].time_ns
    monkeypatch.setattr("tensorferry.server.security.file_watch.time.time_ns", lambda: real() + ahead[0])
    return ahead


def test_a_replaced_file_of_equal_size_and_times_is_reported(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("1")
    other.write_text("2")
    settle(path)
    watched = FileWatch([path])
    watched.changed()
    settle(other)
    os.replace(other, path)
    assert watched.changed()
    assert not watched.changed()


def test_a_change_of_an_indirect_link_is_reported(tmp_path: Path) -> None:
    """Kubernetes links tls.crt -> ..data/tls.crt and ..data -> ..2026, and replaces ..data."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tls.crt").write_text(version)
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "tls.crt").symlink_to("..data/tls.crt")
    watched = FileWatch([tmp_path / "tls.crt"])
    assert watched.changed()
    (tmp_path / "..new").symlink_to("2")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    assert watched.changed()
    assert not watched.changed()


def test_a_change_or_removal_of_one_of_several_files_is_reported(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text("1")
    watched = FileWatch(paths)
    watched.changed()
    paths[1].unlink()
    assert watched.changed()
    assert not watched.changed()
    paths[1].write_text("1")
    assert watched.changed()


def test_a_recently_written_file_is_reported_again(tmp_path: Path, clock_ahead: list[int]) -> None:
    """A second write may leave the same times, inode and size."""
    clock_ahead[0] = 0
    path = tmp_path / "a"
    path.write_text("1")
    watched = FileWatch([path])
    assert watched.changed()
    assert watched.changed()
    clock_ahead[0] = 10**9
    assert watched.changed()
    assert not watched.changed()
