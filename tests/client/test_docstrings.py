"""Every public name has an example, which is run, and both clients have the same names."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client import docstrings
from support.processes.server import ServerProcess

from tensorferry import client as package
from tensorferry.client import InferenceClient, aio

OBJECTS = dict(docstrings.public_objects())


@pytest.fixture
async def variables(digits: ServerProcess) -> AsyncIterator[dict[str, Any]]:
    names: dict[str, Any] = {name: getattr(package, name) for name in package.__all__}
    images = {"image": np.zeros((1, 8, 8), np.uint8)}
    with InferenceClient(digits.address) as client:
        client.infer("digits", images)
        yield {**names, "np": np, "asyncio": asyncio, "Path": Path, "client": client}


def test_every_public_name_but_errors_and_properties_has_an_example() -> None:
    without = [kind for kind in OBJECTS.values() if not docstrings.examples(kind)]
    assert [kind for kind in without if inspect.isfunction(kind)] == []
    assert [kind for kind in without if inspect.isclass(kind) and not issubclass(kind, Exception)] == []


async def test_the_examples_are_right(digits: ServerProcess, variables: dict[str, Any]) -> None:
    """Those that need a GPU are run by memory/test_cuda_shared_memory.py."""
    async with aio.InferenceClient(digits.address) as client:
        names = {**variables, "client": client, "InferenceClient": aio.InferenceClient}
        for name, kind in OBJECTS.items():
            library = {"to_pandas": "pandas", "to_arrow": "pyarrow"}.get(name.rpartition(".")[2])
            if docstrings.needs_a_gpu(name) or (library and find_spec(library) is None):
                continue
            await docstrings.run(kind, dict(names if name.startswith("aio.") else variables), digits.address)


def test_both_clients_have_the_same_public_names() -> None:
    names = {name.removeprefix("aio.") for name in OBJECTS if name.startswith("aio.")}
    assert names == {name for name in OBJECTS if name.startswith(("InferenceClient", "SharedMemory"))}


def test_docstrings_of_the_client_for_threads_do_not_mention_asyncio() -> None:
    texts = {name: str(kind.__doc__) for name, kind in OBJECTS.items() if not name.startswith("aio.")}
    assert not [name for name, text in texts.items() if re.search(r"\b(await|async|task|anext|aclos)", text)]
