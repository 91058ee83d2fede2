"""Log lines on stderr."""

from __future__ import annotations

import logging

import pytest


def written(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the lines since the last call, after the writer thread has written them."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    return capfd.readouterr().err
