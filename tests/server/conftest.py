from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from server.scripted import Door, opened


@pytest.fixture
def door(transport: str) -> Iterator[Door]:
    """A scripted service, reached over gRPC by either transport; leaves no thread and no call behind."""
    yield from opened(transport)


@pytest.fixture
def open_door(transport: str) -> Iterator[Callable[..., Door]]:
    """The same, with limits and listeners of the test's own."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextmanager(opened)(transport, **options))
