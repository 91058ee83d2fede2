from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from server.scripted import Door, opened


@pytest.fixture
def door() -> Iterator[Door]:
    """A servicer with a scripted service, reached over gRPC; leaves no thread behind."""
    yield from opened()


@pytest.fixture
def open_door() -> Iterator[Callable[..., Door]]:
    """The same, with limits of the test's own."""
    with ExitStack() as stack:
        yield lambda **limits: stack.enter_context(contextmanager(opened)(**limits))
