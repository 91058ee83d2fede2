"""The page in which a server process notes the requests that run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tensorferry.server.processes import running_page
from tensorferry.server.processes.running_page import Running, RunningPage, create_page, read_page


@pytest.fixture
def file() -> Iterator[int]:
    page = create_page()
    yield page
    os.close(page)


@pytest.fixture
def page(file: int) -> RunningPage:
    return RunningPage(os.dup(file))


def running(number: int, *, tried: bool = False) -> Running:
    return Running(number.to_bytes(8, "little"), number.to_bytes(16, "big"), tried)


def test_requests_are_noted_while_they_run(file: int, page: RunningPage) -> None:
    assert read_page(file) == (False, [])
    first, second = page.begin(running(1)), page.begin(running(2, tried=True))
    assert sorted(read_page(file)[1]) == [running(1), running(2, tried=True)]
    page.end(first)
    assert read_page(file) == (False, [running(2, tried=True)])
    page.end(second)
    with page.loading():
        with page.loading():
            pass
        assert read_page(file) == (True, [])
    assert read_page(file) == (False, [])


def test_a_full_page_notes_no_more_until_a_request_ends(file: int, page: RunningPage) -> None:
    places = [page.begin(running(number)) for number in range(running_page._SLOTS)]
    assert 0 not in places
    assert len(set(places)) == running_page._SLOTS
    assert page.begin(running(running_page._SLOTS)) == 0
    page.end(0)
    assert len(read_page(file)[1]) == running_page._SLOTS
    page.end(places[5])
    assert page.begin(running(running_page._SLOTS)) == places[5]


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_the_size_never_changes(file: int, size: int) -> None:
    with pytest.raises(PermissionError):
        os.truncate(file, size)
