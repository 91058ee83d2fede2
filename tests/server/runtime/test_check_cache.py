"""The cache of what checks found, while a model's file changes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from polling import until
from support.models import external, small

from tensorferry.server.runtime.checks.check_cache import CheckCache
from tensorferry.server.runtime.ort_options import OrtOptions


@pytest.mark.parametrize("changed", ["m.onnx", "weights.bin"])
def test_a_result_of_a_file_that_changed_meanwhile_is_neither_stored_nor_returned(
    tmp_path: Path, check_cache: Path, changed: str
) -> None:
    """Of the model, or of its external data."""
    path = small.wide(tmp_path / "m.onnx", 64)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    before = CheckCache(path, OrtOptions(), ["cpu"])
    before.put("kind", "conditions", 1)
    assert before.get("kind", "conditions") == 1

    def has_no_result() -> bool:
        # Again and again, because the clock of files may be some milliseconds late.
        with (tmp_path / changed).open("r+b") as file:
            file.write(b"\x01\x02")
        return before.get("kind", "conditions") is None

    until(has_no_result)
    before.put("other", "conditions", 1)
    assert not (check_cache / "other").exists()


def test_a_link_to_other_weights_is_a_change(tmp_path: Path) -> None:
    """Both files of weights are older than the check."""
    path = tmp_path / "m.onnx"
    external.scaled(path, 2.0, "weights")
    (tmp_path / "weights").rename(tmp_path / "old")
    (tmp_path / "new").write_bytes((tmp_path / "old").read_bytes())
    (tmp_path / "weights").symlink_to("old")
    cache = CheckCache(path, OrtOptions(), ["cpu"])
    cache.put("kind", "conditions", 1)
    (tmp_path / "link").symlink_to("new")
    (tmp_path / "link").rename(tmp_path / "weights")
    assert cache.get("kind", "conditions") is None
