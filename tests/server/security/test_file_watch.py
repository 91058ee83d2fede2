"""Files that change while the server runs, in each of the ways in which files are changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorferry.server.security.file_watch import FileWatch

LONG_AGO = 1_700_000_000


def settle(path: Path) -> None:
    os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.fixture(autouse=True)
def an_old_clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the clock is ahead of the files, in nanoseconds: long enough that all are settled."""
    ahead = [3_600 * 10**9]
    real = FileWatch.changed.__globals__["time"].time_ns
    monkeypatch.setattr("tensorferry.server.security.file_watch.time.time_ns", lambda: real() + ahead[0])
    return ahead


def test_the_first_look_reads_and_the_next_does_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    watched = FileWatch([path])
    assert watched.changed()
    assert not watched.changed()


def test_a_file_that_is_replaced_has_changed_though_its_size_and_times_have_not(tmp_path: Path) -> None:
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


def test_a_link_two_links_away_may_change(tmp_path: Path) -> None:
    """As Kubernetes has it: tls.crt -> ..data/tls.crt, ..data -> ..2026, of which ..data is replaced."""
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


def test_one_of_several_is_enough_and_so_is_its_end(tmp_path: Path) -> None:
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


def test_what_was_just_written_is_read_again(tmp_path: Path, an_old_clock: list[int]) -> None:
    """A second write may leave the same times, inode and size."""
    an_old_clock[0] = 0
    path = tmp_path / "a"
    path.write_text("1")
    watched = FileWatch([path])
    assert watched.changed()
    assert watched.changed()
    an_old_clock[0] = 10**9
    assert watched.changed()
    assert not watched.changed()
