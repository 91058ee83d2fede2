"""Default padding of an ONNX model that reads rows of different lengths from a Python function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.signature import Signature


class RaggedInput(NamedTuple):
    """How the function that makes an input pads its rows: ascending lengths, and the pad value."""

    lengths: tuple[int, ...]
    value: int


class DefaultPadding(NamedTuple):
    """Values of the options `--pad-lengths` and `--pad-values`, or the reason why there are none."""

    pad_lengths: PadLengths | None
    pad_values: tuple[tuple[str, str], ...] = ()
    reason: str = ""


def default_padding(signature: Signature, ragged: Mapping[str, RaggedInput]) -> DefaultPadding:
    """Return how a model pads inputs that functions make, if it declares no padding itself.

    `ragged` has the inputs whose rows differ in length along axis 1, by name. All must have the same axis, and no other
    input may have it, because its pad value is unknown.
    """
    axes: dict[str, str] = {}
    for spec in signature.inputs:
        if spec.name not in ragged:
            continue
        dim = spec.dims[1] if len(spec.dims) > 1 else ""
        if not isinstance(dim, str):
            return _none(f"input {spec.name!r} has the fixed length {dim}")
        if not dim:
            return _none(f"axis 1 of input {spec.name!r} has no name in the file")
        axes[spec.name] = dim
    if not axes:
        return _none("it reads no rows of different lengths")
    if len(set(axes.values())) > 1:
        return _none(f"axis 1 has different names: {axes}")
    axis = next(iter(axes.values()))
    others = [spec.name for spec in signature.inputs if axis in spec.dims[1:] and spec.name not in axes]
    if others:
        return _none(f"input {others[0]!r} also has the axis {axis!r}, and no pad value")
    lengths = min((ragged[name].lengths for name in axes), key=lambda each: each[-1])
    return DefaultPadding(PadLengths(axis, lengths), tuple((name, str(ragged[name].value)) for name in axes))


def _none(reason: str) -> DefaultPadding:
    return DefaultPadding(None, reason=reason)
