"""The cache of what checks found, while a model's file changes."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from tensorferry.server.runtime.checks import check_cache as module
from tensorferry.server.runtime.checks.check_cache import CheckCache
from tensorferry.server.runtime.ort_options import OrtOptions


def test_a_file_that_is_emptied_while_it_is_read_has_no_result(
    tmp_path: Path, check_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy over the file first makes it empty."""
    model = tmp_path / "m.onnx"
    model.write_bytes(b"model")

    class Emptied:
        ACCESS_READ = mmap.ACCESS_READ

        @staticmethod
        def mmap(file: int, length: int, **options: Any) -> mmap.mmap:
            os.truncate(model, 0)
            return mmap.mmap(file, length, **options)

    monkeypatch.setattr(module, "mmap", Emptied)
    cache = CheckCache(model, OrtOptions(), ["cpu"])
    cache.put("kind", "conditions", 1)
    assert cache.get("kind", "conditions") is None
    assert not check_cache.exists()
