"""Descriptors of links: each link has them twice, for the front-end and for the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from tensorferry.server.supervisor.control import close_fds


def create_twice(create_link: Callable[[], Sequence[int]]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the descriptors of a new link, and copies of them. If anything is raised, none is left open."""
    files = create_link()
    try:
        return files, _duplicate(files)
    except OSError:
        close_fds(files)
        raise


def _duplicate(fds: Sequence[int]) -> Sequence[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        close_fds(copies)
        raise
    return copies
