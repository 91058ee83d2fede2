"""The interleaving harness controls every lock and thread of the batcher."""

from __future__ import annotations

import re
from pathlib import Path

from support.batcher.interleave import REPLACED_OTHERWISE, modules_with_threading

import tensorferry.batcher


def test_every_module_that_uses_threading_is_controlled() -> None:
    (package,) = map(Path, tensorferry.batcher.__path__)
    using = {
        ".".join(("tensorferry.batcher", *file.relative_to(package).with_suffix("").parts))
        for file in package.rglob("*.py")
        if re.search(r"^(import|from) threading\b", file.read_text(), re.MULTILINE)
    }
    assert {module.__name__ for module in modules_with_threading()} == using - REPLACED_OTHERWISE
    assert "tensorferry.batcher.queue.request_queue" in using
