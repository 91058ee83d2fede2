from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from support.server.http_rig import ServedHttp, served_http


@pytest.fixture
def serve() -> Iterator[Callable[..., ServedHttp]]:
    """Start servers over a scripted service, with these options."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(served_http(**options))
