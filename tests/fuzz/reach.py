"""Selection of inputs to keep: the smallest that together reach all lines and outcomes that any input
reaches.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz.catalogue import TARGETS

_MOST_BYTES = 20_000
_LONGEST = 2_000


class _Lines:
    """Executed lines of the packages, each with the line before it, so that both ways of a one-line
    branch count.
    """

    def __init__(self) -> None:
        self.seen: set[Any] = set()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "tensorferry" not in frame.f_code.co_filename:
            return None
        before = [0]

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                self.seen.add((frame.f_code.co_filename, before[0], frame.f_lineno))
                before[0] = frame.f_lineno
            return local

        return local


def keep(name: str, found: Path, kept: Path) -> int:
    """Add to a target's kept inputs those that reach more, smallest first; return how many are kept
    then.
    """
    kept.mkdir(parents=True, exist_ok=True)
    logging.getLogger("tensorferry").propagate = False
    total = sum(path.stat().st_size for path in kept.iterdir())
    reached: set[Any] = set()
    with tempfile.TemporaryDirectory() as scratch:
        target = TARGETS[name](Path(scratch))
        for data in target.seeds():
            reached |= _reach(target, data)
        for path in _by_size(kept):
            reached |= _reach(target, path.read_bytes())
        for path in _by_size(found):
            data = path.read_bytes()
            if len(data) > _LONGEST or total + len(data) > _MOST_BYTES:
                continue
            new = _reach(target, data) - reached
            if new:
                reached |= new
                total += len(data)
                (kept / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
        target.close()
    return sum(1 for _ in kept.iterdir())


def _by_size(folder: Path) -> Iterable[Path]:
    return sorted(folder.iterdir(), key=lambda path: (path.stat().st_size, path.name))


def _reach(target: Any, data: bytes) -> set[Any]:
    lines = _Lines()
    threading.settrace(lines.trace)
    sys.settrace(lines.trace)
    try:
        outcome = target.run(data)
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return lines.seen | {outcome}
