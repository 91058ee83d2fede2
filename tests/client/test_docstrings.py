"""Every public name of the client has an example, which is run."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client import docstrings
from support.processes.server import ServerProcess, running

from tensorferry import client as package
from tensorferry.client import InferenceClient, aio

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "digits.onnx"
OBJECTS = dict(docstrings.public_objects())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with the model `digits`, which clients may control."""
    repository = tmp_path_factory.mktemp("repository")
    (repository / "digits" / "1").mkdir(parents=True)
    shutil.copy(DIGITS, repository / "digits" / "1" / "model.onnx")
    options = ("--model-repository", str(repository), "--model-control", "explicit", "--load-model", "digits")
    with running(*options, "--allow-log-settings", "--allow-shared-memory", transport="lane") as server:
        yield server


@pytest.fixture
async def variables(served: ServerProcess) -> AsyncIterator[dict[str, Any]]:
    names: dict[str, Any] = {name: getattr(package, name) for name in package.__all__}
    images = {"image": np.zeros((1, 8, 8), np.uint8)}
    with InferenceClient(served.address) as client:
        client.infer("digits", images)
        yield {**names, "np": np, "asyncio": asyncio, "Path": Path, "client": client}


def test_every_public_name_has_an_example() -> None:
    assert [name for name, kind in OBJECTS.items() if not docstrings.examples(kind)] == []


# test_cuda_shared_memory.py runs the others.
@pytest.mark.parametrize("name", [name for name in OBJECTS if not docstrings.needs_a_gpu(name)])
async def test_the_examples_are_right(served: ServerProcess, variables: dict[str, Any], name: str) -> None:
    library = {"to_pandas": "pandas", "to_arrow": "pyarrow"}.get(name.rpartition(".")[2])
    if library:
        pytest.importorskip(library)
    if not name.startswith("aio."):
        await docstrings.run(OBJECTS[name], variables, served.address)
        return
    async with aio.InferenceClient(served.address) as client:
        names = {**variables, "client": client, "InferenceClient": aio.InferenceClient}
        await docstrings.run(OBJECTS[name], names, served.address)
