from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import one_process
import one_transport
import pytest
from support.processes.server import SERVER_PROCESSES

pytest_plugins = ["e2e.fixtures"]

# Folders whose tests start processes: their files take the longest.
_LONGEST = (
    "docs",
    "crashes",
    "e2e",
    "wire",
    "browser",
    "hostile",
    "conformance",
    "deploy",
    "benchmarks",
    "fuzz",
)


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(folder)],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


def pytest_configure(config: pytest.Config) -> None:
    """Keep the servers' cache of model checks in a temporary directory for the whole run."""
    assert config.cache is not None
    os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("xdg"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest files first, so that no process waits for the last of them. With several processes, skip tests that
    are about one process. Leave out the other transport where it makes no difference.
    """
    order = {folder: place for place, folder in enumerate(_LONGEST)}
    # The node id of a test is tests/FOLDER/...
    items.sort(key=lambda item: order.get(item.nodeid.partition("/")[2].partition("/")[0], len(order)))
    if SERVER_PROCESSES:
        one_process.skip(items)
    if "TRANSPORTS" not in os.environ:
        left_out = one_transport.left_out(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Leave what was collected out of garbage collections: many tests collect, to see that nothing is kept."""
    gc.collect()
    gc.freeze()
