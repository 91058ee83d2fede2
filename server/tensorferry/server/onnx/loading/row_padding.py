"""Default padding of an ONNX model that reads rows of different lengths from a Python function."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.signature import Signature

_log = logging.getLogger("tensorferry.server")


class RaggedInput(NamedTuple):
    """How the function that makes an input pads its rows: to ascending lengths, with a value."""

    lengths: tuple[int, ...]
    value: Any


def with_default_padding(
    config: ServerConfig, name: str, signature: Signature, ragged: Mapping[str, RaggedInput]
) -> ServerConfig:
    """Return the configuration with the default padding of a model that declares none; log why it has none.

    `ragged` has the inputs whose rows differ in length along axis 1, by name.
    """
    if not ragged or config.pad_lengths is not None:
        return config
    found = default_padding(signature, ragged)
    if isinstance(found, str):
        _log.info(
            "model %s is not padded by default, so requests of each length have their own batches: %s; declare "
            "onnx(..., pad_lengths=..., pad_values=...)",
            name,
            found,
        )
        return config
    lengths, values = found
    return replace(config, pad_lengths=lengths, pad_values=values)


def default_padding(
    signature: Signature, ragged: Mapping[str, RaggedInput]
) -> tuple[PadLengths, tuple[tuple[str, str], ...]] | str:
    """Return the values of `--pad-lengths` and `--pad-values` for a model, or why it has none.

    All ragged inputs must have the same axis. No other input may have it, because its pad value is unknown.
    """
    axes: dict[str, str] = {}
    for spec in signature.inputs:
        if spec.name not in ragged:
            continue
        dim = spec.dims[1] if len(spec.dims) > 1 else ""
        if not isinstance(dim, str):
            return f"input {spec.name!r} has the fixed length {dim}"
        if not dim:
            return f"axis 1 of input {spec.name!r} has no name in the file"
        axes[spec.name] = dim
    if len(set(axes.values())) > 1:
        return f"axis 1 of its inputs has different names: {axes}"
    axis = next(iter(axes.values()))
    others = [spec.name for spec in signature.inputs if axis in spec.dims[1:] and spec.name not in axes]
    if others:
        return f"input {others[0]!r} also has the axis {axis!r}, and no pad value"
    for spec in signature.inputs + signature.outputs:
        if spec.dims[1:].count(axis) > 1:
            return f"{spec.name!r} has the axis {axis!r} more than once, and only one axis of a tensor can be padded"
    lengths = min((ragged[name].lengths for name in axes), key=lambda each: each[-1])
    return PadLengths(axis, lengths), tuple((name, str(ragged[name].value)) for name in axes)
