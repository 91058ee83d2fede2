"""Random inputs of a shell command, made from a model's metadata."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import numpy as np

from tensorferry.client.errors import InvalidInput
from tensorferry.client.load.requests import random_array
from tensorferry.client.messages.arguments import quoted
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata, subject_of
from tensorferry.protos.tensors import Array


def dimensions(text: str) -> tuple[str | None, tuple[int, ...]]:
    """Return the name, if there is one, and the lengths in the text of --shape."""
    # From the right, because names may have colons.
    name, colon, sizes = text.rpartition(":")
    numbers = sizes.split(",") if sizes else []
    if (not sizes and not colon) or not all(n.isascii() and n.isdecimal() and len(n) < 19 for n in numbers):
        raise argparse.ArgumentTypeError(f"expected [NAME:]DIMS, such as x:2,16, got {text!r}")
    return name or None, tuple(map(int, numbers))


def shapes_of(
    given: Sequence[tuple[str | None, tuple[int, ...]]], model: ModelMetadata
) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of --shape by input. The only input of a model needs no name. InvalidInput."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in given:
        if name is None and len(model.inputs) != 1:
            names = quoted(tensor.name for tensor in model.inputs)
            received = ",".join(map(str, shape))
            change = "write the input's name before it, as in x:2,16"
            raise InvalidInput(
                "--shape", f"NAME:DIMS, because the model has the inputs {names}", received, change
            )
        known = name or model.inputs[0].name
        if known in shapes:
            raise InvalidInput("--shape", "one for each input", f"two for {known!r}", "give it once")
        shapes[known] = shape
    return shapes


def random_inputs(
    model: ModelMetadata,
    given: Mapping[str, object],
    seed: int,
    rows: int | None,
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, Array]:
    """Return an array for each input that is neither given nor optional.

    The same seed makes the same arrays. `rows` is the length of the first axis where the model
    leaves it open, 1 by default. Other open axes need a shape in `shapes`.
    """
    known = [tensor.name for tensor in model.inputs]
    for name in shapes:
        if name not in known:
            change = f"name one of {', '.join(map(repr, known))}"
            raise InvalidInput("--shape", f"an input of model {model.name!r}", repr(name), change)
    generator = np.random.default_rng(seed)
    return {
        tensor.name: random_array(
            tensor, random_shape(tensor, model.name, rows, shapes), model.name, generator
        )
        for tensor in model.inputs
        if tensor.name not in given and (not tensor.optional or tensor.name in shapes)
    }


def random_shape(
    tensor: TensorMetadata, model: str, rows: int | None, shapes: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """Return the shape of an input's random array."""
    subject = subject_of(tensor, model)
    first, *rest = tensor.shape or (1,)
    if tensor.name in shapes:
        shape = tuple(shapes[tensor.name])
        if len(shape) == len(tensor.shape) - 1:
            shape = (first if first >= 0 else rows or 1, *shape)
        if len(shape) != len(tensor.shape) or any(
            size not in (-1, chosen) for size, chosen in zip(tensor.shape, shape, strict=True)
        ):
            change = "give --shape all axes, with the fixed ones as they are"
            raise InvalidInput(subject, str(tensor), f"the shape {list(shape)}", change)
        return shape
    if rows is not None and tensor.shape and first not in (-1, rows):
        change = f"leave --rows out, or write --rows {first}"
        raise InvalidInput(subject, str(tensor), f"--rows {rows}", change)
    if -1 in rest:
        example = ",".join(str(size) if size >= 0 else "8" for size in (max(first, rows or 1), *rest))
        change = f"choose its axes, such as --shape {tensor.name}:{example}"
        raise InvalidInput(subject, str(tensor), "no lengths for its open axes", change)
    length = 1 if rows is None else rows
    return (first if first >= 0 else length, *rest) if tensor.shape else ()
