"""Examples of docstrings, run against a server; those of the asyncio client may use `await`."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
from collections.abc import Iterator
from typing import Any

from tensorferry import client as package
from tensorferry.client import aio

ADDRESS = "127.0.0.1:8001"
_PARSER = doctest.DocTestParser()
_CHECKER = doctest.OutputChecker()
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the public names, and the public methods and properties of their classes that they define."""
    kinds = {name: getattr(package, name) for name in package.__all__}
    asynchronous = {f"aio.{name}": getattr(aio, name) for name in ("InferenceClient", "SharedMemory")}
    for name, kind in {**kinds, **asynchronous}.items():
        yield name, kind
        if not inspect.isclass(kind):
            continue
        for attribute in dir(kind):
            member = inspect.getattr_static(kind, attribute)
            owner = next((base for base in kind.__mro__ if attribute in vars(base)), object)
            if attribute.startswith("_") or not owner.__module__.startswith("tensorferry."):
                continue
            if inspect.isfunction(member) or isinstance(member, property):
                yield f"{name}.{attribute}", member


def needs_a_gpu(name: str) -> bool:
    """Return whether the examples of this name use memory of a GPU."""
    return name.startswith("Device")


def examples(kind: Any) -> list[doctest.Example]:
    """Return the examples in the docstring of the object itself, not of a base class."""
    text = vars(kind).get("__doc__") if inspect.isclass(kind) else kind.__doc__
    return _PARSER.get_examples(inspect.cleandoc(text or ""))


async def run(kind: Any, variables: dict[str, Any], address: str) -> None:
    """Run the examples in order, and compare what each prints with what follows it."""
    for example in examples(kind):
        source = example.source.replace(ADDRESS, address)
        printed = io.StringIO()
        code = compile(source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.redirect_stdout(printed):
            result = eval(code, variables)
            if inspect.iscoroutine(result):
                await result
        got = printed.getvalue()
        assert _CHECKER.check_output(example.want, got, _FLAGS), f"{source}printed {got}, not {example.want}"
