"""Output and refusals of shell commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest

Output: TypeAlias = pytest.CaptureFixture[str]


def refusal(capsys: Output, command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> str:
    """Return the one line with which a command exits with 2."""
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error
