"""Each TOML block of the docs is a file that --config accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.pages import Block, blocks

from tensorferry.server.config.load import load_config

TOML = [block for block in blocks() if block.language == "toml"]


@pytest.mark.parametrize("block", TOML, ids=lambda block: block.place)
def test_a_block_is_a_configuration(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(block.text)
    # Tables without a path are for models that the command line names.
    named = [] if "models = " in block.text or "path = " in block.text else ["app.py"]
    assert load_config(named, {}, {}, file).models


def test_the_guide_has_tables_of_models() -> None:
    assert any("[models.digits]" in block.text for block in TOML if block.page == "docs/guides/serving.md")
