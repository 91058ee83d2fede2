"""Checks of declarations. Each raises DeclarationError, which says what was declared and what to change."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any

from tensorferry.serving.errors import DeclarationError
from tensorferry.serving.tensor_types import TensorType

if TYPE_CHECKING:
    from tensorferry.serving.declarations import FunctionModel

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

# The bound of --max-batch-size.
_MOST_ROWS = 1 << 20


def check_name(name: str) -> None:
    """Check the name of a model."""
    if not _NAME.fullmatch(name):
        raise DeclarationError(
            f"a model is named {name!r}; a name starts with a letter or digit, continues with letters, digits, '.', '_' and "
            "'-', and has at most 128 characters: give another `name`"
        )


def check_batch_size(what: str, value: int | None) -> None:
    """Check a `max_batch_size`; None is the default of the server. `what` names the model."""
    _check_integer(what, "max_batch_size", value, 0, _MOST_ROWS)


def _check_integer(what: str, setting: str, value: object, least: int, most: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DeclarationError(f"{what}: {setting} is {value!r}; it must be an integer of at least {least}")
    if most is not None and value > most:
        raise DeclarationError(f"{what}: {setting} is {value}; it must be at most {most}")


def check_outputs(pipeline: str, outputs: Sequence[str]) -> None:
    """Check the `outputs` of a pipeline."""
    if isinstance(outputs, str):
        raise DeclarationError(
            f"pipeline {pipeline!r} has outputs={outputs!r}, which is a text; give a list: [{outputs!r}]"
        )
    if not outputs:
        raise DeclarationError(
            f"pipeline {pipeline!r} has no outputs; name at least one tensor, or leave `outputs` out"
        )
    if len(set(outputs)) < len(outputs):
        raise DeclarationError(f"pipeline {pipeline!r} has outputs={[*outputs]}; name each tensor once")


def checked_pad_lengths(model: str, given: tuple[str, Sequence[int]]) -> tuple[str, tuple[int, ...]]:
    """Return the axis and the lengths of `pad_lengths`."""
    try:
        axis, listed = given
        lengths = tuple(map(index, listed))
    except (TypeError, ValueError):
        axis, lengths = "", ()
    if not isinstance(axis, str) or not (axis and lengths) or any(b <= a for a, b in pairwise((0, *lengths))):
        raise DeclarationError(
            f"model {model!r}: pad_lengths is {given!r}; it must be the name of an axis, and ascending lengths of at least 1, "
            "such as ('sequence', (16, 32))"
        )
    return axis, lengths


def check_function(declared: FunctionModel) -> None:
    """Check all but the name of a declared function."""
    what = f"model {declared.name!r}"
    for kind, types in (("inputs", declared.inputs), ("outputs", declared.outputs)):
        if not types:
            raise DeclarationError(
                f"{what} declares no {kind}; give @model({kind}={{'name': FP32[-1, 4]}}), or annotate the function"
            )
        for name, type_ in types.items():
            if not isinstance(name, str) or not name:
                raise DeclarationError(
                    f"{what}: the name {name!r} in `{kind}` is no name; give a str that is not empty"
                )
            if not isinstance(type_, TensorType):
                raise DeclarationError(
                    f"{what}: {kind} {name!r} is {type_!r}; write a type such as FP32[-1, 4]"
                )
            if (
                declared.max_batch_size != 0
                and declared.batched
                and (not type_.dims or (isinstance(type_.dims[0], int) and type_.dims[0] >= 0))
            ):
                raise DeclarationError(
                    f"{what}: {name!r} is {type_}; axis 0 counts rows and must be -1. Declare batched=False for a function of "
                    "one row, or max_batch_size=0 if requests have no rows"
                )
    _check_integer(what, "workers", declared.workers, 1)
    _check_integer(what, "processes", declared.processes, 0)
    check_batch_size(what, declared.max_batch_size)
    if declared.processes and declared.workers > 1:
        raise DeclarationError(
            f"{what} has {declared.workers} workers and {declared.processes} processes; give one of both"
        )
    if declared.processes and declared.steady:
        raise DeclarationError(
            f"{what} runs in processes, so it waits for them and is not steady; leave out `steady`"
        )
    if inspect.isclass(declared.function) and inspect.iscoroutinefunction(
        getattr(declared.function, "load", None)
    ):
        raise DeclarationError(f"{what}: `load` is an `async def`, which is never awaited; write `def`")
    _check_streams(declared, what)
    if not declared.batched and declared.max_batch_size is not None:
        raise DeclarationError(
            f"{what} takes one row at a time, so max_batch_size, which is {declared.max_batch_size}, has no effect; leave out "
            "one of both"
        )
    if declared.example is not None and set(declared.example) != set(declared.inputs):
        raise DeclarationError(
            f"{what}: example has {sorted(declared.example)}; it must have an array for each input: "
            f"{sorted(declared.inputs)}"
        )


def _check_streams(declared: FunctionModel, what: str) -> None:
    function: Any = declared.function
    called = function.__call__ if inspect.isclass(function) else function
    yields = inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)
    if not declared.streams:
        if yields:
            raise DeclarationError(
                f"{what} yields, but is not declared with streams=True; declare that, or return the outputs"
            )
        if inspect.iscoroutinefunction(called):
            raise DeclarationError(
                f"{what} is an `async def`, which returns no outputs before it is awaited; write `def`"
            )
        return
    if inspect.iscoroutinefunction(called):
        raise DeclarationError(
            f"{what} is declared with streams=True, but is an `async def` without `yield`; yield each answer"
        )
    if declared.max_batch_size or not declared.batched:
        raise DeclarationError(
            f"{what} answers in streams, so each request runs alone; leave out max_batch_size and batched"
        )
    if declared.steady:
        raise DeclarationError(
            f"{what} answers in streams, so it waits for clients and is not steady; leave out `steady`"
        )
