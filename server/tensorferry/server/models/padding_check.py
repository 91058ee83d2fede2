"""Padding of ragged inputs: what the ONNX file and the options say of it, and the proof that it is safe.

The proof: random rows of several lengths are run alone as they are, then padded, alone and together with rows of
other lengths. Rows that are all negative, and loud ones beside quiet ones, are tried as well: a maximum over the axis
that counts padding of 0 shows there. A model whose answer changes with the padding (a mean over the axis that counts it,
attention without a mask) is served unpadded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tensorferry.batcher import Padding, PadInput, batch_inference
from tensorferry.protos.tensors import Datatype
from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.errors import StartError
from tensorferry.server.runtime.sampling import Array, Run, describe_difference, random_inputs
from tensorferry.server.signature import Signature, TensorSpec


def declared_padding(signature: Signature, declared: PadLengths, values: Mapping[str, str]) -> Padding:
    """How a model with this signature is padded; StartError says what is missing or does not fit.

    Inputs and outputs carry the axis where they have a dimension of its name behind axis 0.
    """
    inputs = {spec: _axis_of(spec, declared.axis, "input") for spec in signature.inputs}
    outputs = {spec: _axis_of(spec, declared.axis, "output") for spec in signature.outputs}
    padded = {spec: axis for spec, axis in inputs.items() if axis is not None}
    if not padded:
        names = sorted({dim for spec in inputs for dim in spec.dims[1:] if isinstance(dim, str) and dim})
        raise StartError(
            f"--pad-lengths names the axis {declared.axis!r}, but no input has it behind the batch axis; "
            f"the inputs' axes that vary and have a name are: {', '.join(names) or 'none'}"
        )
    lacking = [spec.name for spec in padded if spec.name not in values]
    if lacking:
        example = ",".join(f"{spec.name}={values.get(spec.name, '...')}" for spec in padded)
        raise StartError(
            f"no pad value for {', '.join(lacking)}: each input with the axis {declared.axis!r} of --pad-lengths "
            f"needs one: --pad-values {example}"
        )
    for spec, axis in inputs.items():
        if axis is None and spec.name in values:
            raise StartError(
                f"--pad-values names the input {spec.name!r}, which has no axis {declared.axis!r}; "
                f"those that have are: {', '.join(spec.name for spec in padded)}"
            )
    return Padding(
        declared.lengths,
        {spec.name: PadInput(axis, _value(spec, values[spec.name])) for spec, axis in padded.items()},
        {spec.name: axis for spec, axis in outputs.items() if axis is not None},
    )


def _axis_of(spec: TensorSpec, name: str, kind: str) -> int | None:
    axes = [axis for axis, dim in enumerate(spec.dims) if axis and dim == name]
    if len(axes) > 1:
        raise StartError(
            f"--pad-lengths names the axis {name!r}, which {kind} {spec.name!r} has more than once {list(spec.dims)}; "
            "only one axis of a tensor can be padded: leave out --pad-lengths"
        )
    return axes[0] if axes else None


def _value(spec: TensorSpec, text: str) -> Any:
    """A pad value in the form in which the input's elements are stored."""
    try:
        return _parse(spec.datatype, text)
    except (KeyError, ValueError, OverflowError):
        raise StartError(
            f"--pad-values gives {text!r} for the input {spec.name!r}; it must be a value of {spec.datatype.name}"
        ) from None


def _parse(datatype: Datatype, text: str) -> Any:
    if datatype.name == "BYTES":
        return text
    if datatype.name == "BOOL":
        return {"0": False, "false": False, "1": True, "true": True}[text.lower()]
    if datatype.name == "BF16":
        return np.asarray(np.asarray(float(text), "<f4").view("<u4") >> 16, "<u2")
    kind = datatype.storage
    if kind.kind == "f":
        with np.errstate(over="ignore"):
            value = kind.type(float(text))
        if np.isinf(value) and not np.isinf(float(text)):
            raise OverflowError
        return value
    if not np.iinfo(kind).min <= int(text) <= np.iinfo(kind).max:
        raise OverflowError
    return kind.type(int(text))


def _as_drawn(floats: Array, place: int) -> Array:
    return floats


def _negative(floats: Array, place: int) -> Array:
    return -np.abs(floats)


def _loud_or_quiet(floats: Array, place: int) -> Array:
    return np.asarray(floats * floats.dtype.type(100 if place % 2 else 0.01))


# What becomes of the floats of the row at each place of a batch.
_CHANGES = (_as_drawn, _negative, _loud_or_quiet)


def padding_dependence(
    signature: Signature, run: Run, padding: Padding, axis: str, size: int, precision: float = 0.0
) -> str:
    """Why padding changes the answers of a model; "" when it does not. Never raises.

    `size` is for the dimensions that vary besides the batch axis and the padded one, `axis`; `precision` is
    as in `prove`.
    """
    below = 0
    for rung in padding.lengths:
        for change in _CHANGES:
            try:
                reason = _compare(signature, run, padding, axis, size, below, rung, precision, change)
            except Exception as error:
                reason = f"it does not run on rows padded to {rung} ({error})"
            if reason:
                return reason
        below = rung
    return ""


def _compare(
    signature: Signature,
    run: Run,
    padding: Padding,
    axis: str,
    size: int,
    below: int,
    rung: int,
    precision: float,
    change: Callable[[Array, int], Array],
) -> str:
    # The longest and the shortest that are padded to the rung, one between, and one that needs none.
    lengths = sorted({max(below + 1, rung - 1), below + 1, (below + 1 + rung) // 2, rung}, reverse=True)
    samples = [
        _changed(signature, _content(signature, padding, axis, size, length), change, place)
        for place, length in enumerate(lengths)
    ]
    try:
        alone = [run(inputs) for inputs in samples]
    except Exception:
        if change is _as_drawn:
            raise
        # The model is not made for such values.
        return ""
    examples = [{name: array[0] for name, array in inputs.items()} for inputs in samples]
    for together, how in ((1, f"padded to {rung}"), (len(lengths), f"padded to {rung} beside others")):
        answers = batch_inference(run, examples, together, padding=padding)
        for length, expected, got in zip(lengths, alone, answers, strict=True):
            for spec in signature.outputs:
                answer = np.asarray(got[spec.name])[None]
                difference = describe_difference(spec, expected[spec.name], answer, precision)
                if difference:
                    return f"output {spec.name!r} of a row of length {length} changes when it is {how}: {difference}"
    return ""


def _changed(
    signature: Signature, inputs: dict[str, Array], change: Callable[[Array, int], Array], place: int
) -> dict[str, Array]:
    return {
        spec.name: change(inputs[spec.name], place)
        if spec.datatype.storage.kind == "f"
        else inputs[spec.name]
        for spec in signature.inputs
    }


def _content(signature: Signature, padding: Padding, axis: str, size: int, length: int) -> dict[str, Array]:
    """A random row of this length, whose first position is not all padding.

    A mask of nothing but zeros, say, is no row that anybody sends, and what attention makes of it
    does change with the length.
    """
    inputs = random_inputs(signature, 1, size, seed=length, sizes={axis: length})
    for spec in signature.inputs:
        pad = padding.inputs.get(spec.name) if isinstance(padding.inputs, Mapping) else padding.inputs
        if pad is not None and spec.datatype.storage.kind in "iub" and spec.datatype.name != "BF16":
            first = np.moveaxis(inputs[spec.name], pad.axis, 0)[0]
            first[first == pad.value] = 0 if pad.value else 1
    return inputs
