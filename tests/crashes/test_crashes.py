"""A few kills of `make crashes`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from crashes.__main__ import verdicts
from crashes.crashes import run


@pytest.mark.timeout(300)
def test_processes_that_die_harm_no_other_calls() -> None:
    # A short path, because that of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as folder:
        found = run(1, 1, "lane", Path(folder) / "server")
    assert all(verdicts(found).values()), found.all_wrong
    assert found.sent.total() > 0
