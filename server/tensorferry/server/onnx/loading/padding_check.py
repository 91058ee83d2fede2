"""Padding of inputs to common lengths: its parsing, and the check that it changes no answers.

Random rows of several lengths are run alone without padding, then padded, alone and together with rows of other
lengths. Some rows are all negative, except for integers of 32 bits and more. Some have large values beside rows with small
ones. Both show a maximum over the axis that counts padding of 0. Integers without the axis are the row's length in some
rows, because a model may read that in place of a mask. A model whose answers change with the padding is served
unpadded, for instance one with a mean over the axis or attention without a mask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tensorferry.batcher import Padding, PadInput, batch_inference
from tensorferry.protos.tensors import DATATYPES, TensorError, from_numbers
from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.onnx.batching.decision import batching_policy
from tensorferry.server.onnx.loading.preparation import PreparedModel
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.checks.sampling import (
    Array,
    Run,
    array_of_floats,
    as_float64,
    describe_difference,
    random_inputs,
)
from tensorferry.server.signature import Signature, TensorSpec

# The steps of `Padding`. On a GPU, batches of few shapes run faster than those of many.
_STEPS_ON_CPU = 8

_log = logging.getLogger("tensorferry.server")

# Integers that are numbers, such as samples of a sound. Larger ones are mostly ids and masks, which are never negative.
_SMALL_INTEGERS = ("INT8", "INT16")

# Changes an input of the row of a length at a position of a batch.
_Change = Callable[[TensorSpec, Array, int, int], Array]


def parse_padding(
    signature: Signature, declared: PadLengths, values: Mapping[str, str], steps: int = 1
) -> Padding:
    """Return how a model with this signature is padded; StartError names what is missing or does not fit.

    The axis of an input or output is its dimension with the declared name, behind axis 0.
    """
    inputs = {spec: _axis_of(spec, declared.axis, "input") for spec in signature.inputs}
    outputs = {spec: _axis_of(spec, declared.axis, "output") for spec in signature.outputs}
    padded = {spec: axis for spec, axis in inputs.items() if axis is not None}
    if not padded:
        names = sorted({dim for spec in inputs for dim in spec.dims[1:] if isinstance(dim, str) and dim})
        raise StartError(
            f"--pad-lengths names the axis {declared.axis!r}, but no input has it behind the batch axis; "
            f"the named dynamic axes of the inputs are: {', '.join(names) or 'none'}"
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
        steps,
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
    """Return a pad value in the storage type of the input."""
    datatype = spec.datatype
    try:
        match datatype.name:
            case "BYTES":
                return spec.element(text)
            case "BOOL":
                return {"0": False, "false": False, "1": True, "true": True}[text.lower()]
            case "BF16":
                return array_of_floats(from_numbers(float(text), DATATYPES["FP32"]), datatype)
        return from_numbers(int(text) if datatype.storage.kind in "iu" else float(text), datatype)[()]
    except (KeyError, ValueError, OverflowError, TensorError):
        raise StartError(
            f"--pad-values gives {text!r} for the input {spec.name!r}; it must be a value of {datatype.name}"
        ) from None


def _negative(spec: TensorSpec, array: Array, position: int, length: int) -> Array:
    if spec.is_float:
        return array_of_floats(-np.abs(as_float64(array, spec)), spec.datatype)
    # Not 0, which may be the pad value.
    return np.asarray(-1 - np.abs(array)) if spec.datatype.name in _SMALL_INTEGERS else array


def _large_or_small(spec: TensorSpec, array: Array, position: int, length: int) -> Array:
    if not spec.is_float:
        return array
    return array_of_floats(as_float64(array, spec) * (100 if position % 2 else 0.01), spec.datatype)


# None for random values as they are.
_CHANGES: tuple[_Change | None, ...] = (None, _negative, _large_or_small)


def padding_dependence(
    signature: Signature,
    run: Run,
    padding: Padding,
    axis: str,
    size: int,
    precision: float = 0.0,
    budget: LoadBudget | None = None,
    known: Callable[[int, int], bool] = lambda length, number: False,
    keep: Callable[[int, int], None] = lambda length, number: None,
) -> str:
    """Return why padding changes the answers of a model; "" if it does not. Never raises.

    `size` is the length of the dynamic axes other than the batch axis and the padded one, `axis`. `precision` and `budget`
    are as in `ComparisonSettings`. Each length is tried with several kinds of rows, which are numbered. Those that are `known`
    to show no change are not tried, and `keep` gets each that was: one load may have no time for all kinds of a length.
    """
    check = _PaddingCheck(signature, run, padding, axis, size, precision)
    changes = [*_CHANGES]
    if any(map(check.may_be_length, signature.inputs)):
        changes.append(check.with_length)
    first, *others = zip((0, *padding.lengths), padding.lengths, strict=False)
    # The longest is the most different.
    for shorter, length in (first, *reversed(others)):
        for number, change in enumerate(changes):
            if known(length, number):
                continue
            if budget is not None and length != first[1] and not budget.allows(1):
                return ""
            try:
                reason = check.compare(shorter, length, change)
            except Exception as error:
                reason = f"it does not run on rows padded to {length} ({error})"
            if reason:
                return reason
            keep(length, number)
    return ""


class _PaddingCheck(NamedTuple):
    """A model and its padding. Fields are as in `padding_dependence`."""

    signature: Signature
    run: Run
    padding: Padding
    axis: str
    size: int
    precision: float

    def compare(self, shorter: int, padded: int, change: _Change | None) -> str:
        """Return why rows longer than `shorter` change if they are padded to the length `padded`; "" if they do not."""
        # The longest and the shortest rows that are padded to this length, one between, and one without padding.
        lengths = sorted(
            {max(shorter + 1, padded - 1), shorter + 1, (shorter + 1 + padded) // 2, padded}, reverse=True
        )
        samples = [self._random_row(length) for length in lengths]
        if change is not None:
            for position, sample in enumerate(samples):
                for spec in self.signature.inputs:
                    sample[spec.name] = change(spec, sample[spec.name], position, lengths[position])
        try:
            alone = [self.run(inputs) for inputs in samples]
        except Exception:
            if change is None:
                raise
            # The model rejects such values.
            return ""
        rows = [{name: array[0] for name, array in inputs.items()} for inputs in samples]
        for together, how in (
            (1, f"padded to {padded}"),
            (len(lengths), f"padded to {padded} beside others"),
        ):
            answers = batch_inference(self.run, rows, together, padding=self.padding)
            for length, expected, got in zip(lengths, alone, answers, strict=True):
                for spec in self.signature.outputs:
                    answer = np.asarray(got[spec.name])[None]
                    difference = describe_difference(spec, expected[spec.name], answer, self.precision)
                    if difference:
                        return f"output {spec.name!r} of a row of length {length} changes when it is {how}: {difference}"
        return ""

    def may_be_length(self, spec: TensorSpec) -> bool:
        """Whether an input may have the lengths of rows: it has integers, and not the padded axis."""
        return (
            self.axis not in spec.dims[1:]
            and spec.datatype.storage.kind in "iu"
            and spec.datatype.size >= np.dtype(np.int32).itemsize
        )

    def with_length(self, spec: TensorSpec, array: Array, position: int, length: int) -> Array:
        """Return an input that may have the lengths of rows with them."""
        return np.full_like(array, length) if self.may_be_length(spec) else array

    def _random_row(self, length: int) -> dict[str, Array]:
        """Return a random row of this length whose first position is not padding in every input.

        A mask of zeros only, for instance, does not occur in real requests, and attention with it does depend on the
        length.
        """
        inputs = random_inputs(self.signature, 1, self.size, seed=length, sizes={self.axis: length})
        for spec in self.signature.inputs:
            pads = self.padding.inputs
            pad = pads.get(spec.name) if isinstance(pads, Mapping) else pads
            if pad is not None and spec.datatype.storage.kind in "iub" and not spec.is_float:
                first = np.moveaxis(inputs[spec.name], pad.axis, 0)[0]
                first[first == pad.value] = 0 if pad.value else 1
        return inputs


def declared_padding(prepared: PreparedModel, server_config: ServerConfig) -> Padding | None:
    """Return the padding that the server's options declare; StartError if it does not fit the model.

    A trusted model gets exactly the declared lengths, because no other length was tried.
    """
    if server_config.pad_lengths is None:
        return None
    trusted = batching_policy(prepared.config, server_config) == "trust"
    steps = _STEPS_ON_CPU if set(prepared.settings.devices) == {"cpu"} and not trusted else 1
    values = dict(server_config.pad_values)
    try:
        return parse_padding(prepared.io_mapping.signature, server_config.pad_lengths, values, steps)
    except StartError as error:
        raise StartError(f"{prepared.file.source}: {error}") from None


def decide_padding(
    name: str, prepared: PreparedModel, run: Run, server_config: ServerConfig, declared: Padding | None
) -> Padding | None:
    """Return the declared padding if it is safe for the model; else log why it is not used, and return None."""
    if declared is None or server_config.pad_lengths is None:
        return None
    if not prepared.settings.merges:
        how = "served unbatched" if not prepared.settings.max_batch_size else "not batched"
        _log.warning("model %s is not padded: it is %s, so requests share no batch", name, how)
        return None
    if prepared.io_mapping.signature.shared_inputs(batched=True):
        _log.warning("model %s is not padded: it has an input without a batch axis", name)
        return None
    if batching_policy(prepared.config, server_config) == "trust":
        _log.warning("model %s is padded unchecked (--batching trust)", name)
        return declared
    signature, axis = prepared.io_mapping.signature, server_config.pad_lengths.axis
    whole = replace(declared, steps=1)
    conditions = (signature, whole, axis, prepared.working_size, prepared.precision)
    # Each by itself, because the budget may be too small for all. The next load tries those that are left.
    reason = padding_dependence(
        signature,
        run,
        whole,
        axis,
        prepared.working_size or 1,
        prepared.precision,
        prepared.budget,
        lambda *which: prepared.cache.get("padding", (*conditions, *which)) == "",
        lambda *which: prepared.cache.put("padding", (*conditions, *which), ""),
    )
    if reason:
        _log.warning(
            "model %s is not padded, requests of each length have their own batches: %s (--batching trust pads it anyway)",
            name,
            reason,
        )
        return None
    return declared
