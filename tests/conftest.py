from __future__ import annotations

import os

import pytest

pytest_plugins = ["e2e.fixtures"]

# Folders whose tests start processes: their files take the longest.
_LONGEST = ("wire", "e2e", "fuzz", "deploy", "browser", "conformance", "benchmarks")


def pytest_configure(config: pytest.Config) -> None:
    """What servers find out about models is kept where it harms nobody, for all runs of the tests."""
    assert config.cache is not None
    os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("xdg"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files are begun first, so that none is what all cores but one wait for in the end."""
    order = {folder: place for place, folder in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
