from __future__ import annotations

import pytest

pytest_plugins = ["e2e.fixtures"]

# Folders whose tests start processes: their files take the longest.
_LONGEST = ("wire", "e2e", "fuzz", "deploy", "browser", "conformance", "benchmarks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files are begun first, so that none is what all cores but one wait for in the end."""
    order = {folder: place for place, folder in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
