"""The client for threads is generated from the asyncio client."""

from __future__ import annotations

import re

import pytest
from client.docstrings import public_objects

import async_to_sync

OBJECTS = dict(public_objects())


def test_the_generated_modules_are_up_to_date() -> None:
    async_to_sync.main(["--check"])


def test_both_clients_have_the_same_public_names() -> None:
    names = {name.removeprefix("aio.") for name in OBJECTS if name.startswith("aio.")}
    assert names == {name for name in OBJECTS if name.startswith(("InferenceClient", "SharedMemory"))}


def test_docstrings_of_the_client_for_threads_do_not_mention_asyncio() -> None:
    texts = {name: str(kind.__doc__) for name, kind in OBJECTS.items() if not name.startswith("aio.")}
    assert not [name for name, text in texts.items() if re.search(r"\b(await|async|task|anext|aclos)", text)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = await f(a, g(b))\n", "x = f(a, g(b))\n"),
        ("x = (await f(g(h()), (1, 2)))[0]\n", "x = f(g(h()), (1, 2))[0]\n"),
        ("x = g(await f(), await h())\n", "x = g(f(), h())\n"),
        ("def f(a: AsyncIterable[A] | Iterable[A]) -> A:\n", "def f(a: Iterable[A]) -> A:\n"),
        ("async def f() -> AsyncGenerator[A]:\n", "def f() -> Generator[A, None, None]:\n"),
        ("try:\n    f()\nexcept E:  # asyncio only\n    g()\n\nh()\n", "try:\n    f()\nh()\n"),
    ],
)
def test_await_and_what_is_only_for_asyncio_is_removed(source: str, expected: str) -> None:
    assert async_to_sync.converted(source) == expected
