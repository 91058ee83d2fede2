"""What the program's log has put on stderr."""

from __future__ import annotations

import logging

import pytest


def written(capfd: pytest.CaptureFixture[str]) -> str:
    """All since the last look, once the thread that writes it has."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    return capfd.readouterr().err
