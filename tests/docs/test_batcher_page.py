"""docs/reference/batcher.md names the options and the public names of the batcher."""

from __future__ import annotations

import builtins
import inspect
import re

from docs.pages import ROOT

import tensorferry.batcher as batcher

PAGE = (ROOT / "docs" / "reference" / "batcher.md").read_text()


def test_the_page_names_every_option() -> None:
    options = set(inspect.signature(batcher.Batcher).parameters) - {"model_fn"}
    assert not {option for option in options if not re.search(rf"^\| `{option}` \|", PAGE, re.MULTILINE)}


def test_the_page_names_every_public_name() -> None:
    assert set(batcher.__all__) <= set(re.findall(r"\w+", PAGE))


def test_every_class_on_the_page_is_public() -> None:
    named = set(re.findall(r"`([A-Z][a-z]\w+)", PAGE)) - {"InferenceBatcher"}
    assert not {name for name in named if not hasattr(batcher, name) and not hasattr(builtins, name)}
