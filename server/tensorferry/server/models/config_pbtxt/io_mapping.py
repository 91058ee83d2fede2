"""Mapping between the tensors of a model's configuration, which clients see, and those of its ONNX file.

If the shapes differ (`reshape`), tensors are reshaped without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt

from tensorferry.protos import model_config_pb2 as pb
from tensorferry.server.errors import ModelConfigError, ModelFailedError
from tensorferry.server.models.config_pbtxt.pbtxt import type_name
from tensorferry.server.signature import Signature, TensorSpec

Array = npt.NDArray[Any]
_Tensor = pb.ModelInput | pb.ModelOutput

_DYNAMIC = -1


@dataclass(frozen=True, slots=True)
class Reshape:
    """A tensor's shape on the wire and in the model, without the batch axis if `batched`. -1 is a dynamic dimension.

    The n-th dynamic dimension has the same size in both.
    """

    wire: tuple[int, ...]
    model: tuple[int, ...]
    batched: bool

    def to_model(self, array: Array) -> Array:
        """Return the array in the model's shape."""
        return self._reshaped(array, self.wire, self.model)

    def to_wire(self, array: Array) -> Array:
        """Return the array in the shape that clients see."""
        # A scalar of the file may have any shape, because some files declare tensors of unknown shape as scalars.
        if not self.model and array.ndim > self.batched:
            return array
        return self._reshaped(array, self.model, self.wire)

    def _reshaped(self, array: Array, before: Sequence[int], after: Sequence[int]) -> Array:
        rows = array.shape[: int(self.batched)]
        found = iter(
            [size for size, dim in zip(array.shape[len(rows) :], before, strict=True) if dim == _DYNAMIC]
        )
        return array.reshape((*rows, *(next(found) if dim == _DYNAMIC else dim for dim in after)))


@dataclass(frozen=True, slots=True)
class IoMapping:
    """The signature that clients see, and the reshapes between it and the model's, by tensor name."""

    signature: Signature
    inputs: Mapping[str, Reshape] = field(default_factory=dict)
    outputs: Mapping[str, Reshape] = field(default_factory=dict)

    def runner(
        self, run: Callable[[Mapping[str, Array]], dict[str, Array]]
    ) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """Return a function that runs the model on tensors in the shapes that clients see."""
        if not self.inputs and not self.outputs:
            return run

        def reshaped(inputs: Mapping[str, Array]) -> dict[str, Array]:
            given = {
                name: self.inputs[name].to_model(array) if name in self.inputs else array
                for name, array in inputs.items()
            }
            outputs = run(given)
            for name, reshape in self.outputs.items():
                try:
                    outputs[name] = reshape.to_wire(outputs[name])
                except ValueError as error:
                    shape = list(outputs[name].shape)
                    raise ModelFailedError(
                        f"output {name!r} has shape {shape}, which does not fit the reshape in the model's "
                        f"configuration, from {list(reshape.model)} to {list(reshape.wire)}"
                    ) from error
            return outputs

        return reshaped


def io_mapping_of(config: pb.ModelConfig, signature: Signature) -> IoMapping:
    """Compare a completed configuration with the ONNX file's signature; ModelConfigError names both sides."""
    model, batched = config.name, config.max_batch_size > 0
    required = [tensor for tensor in config.input if not tensor.optional]
    if len(required) != len(signature.inputs):
        raise ModelConfigError(
            f"unable to load model {model!r}, configuration expects {len(required)} inputs, model provides "
            f"{len(signature.inputs)}: {_names(signature.inputs)}; the model's optional inputs, which need 'optional: "
            f"true', are: {_names(signature.optional)}"
        )
    inputs, reshapes_in = _tensors(required, signature.inputs, "input", model, batched)
    given = [tensor for tensor in config.input if tensor.optional]
    optional, reshapes_optional = _tensors(given, signature.optional, "optional input", model, batched)
    outputs, reshapes_out = _tensors(config.output, signature.outputs, "output", model, batched)
    served = Signature(inputs, outputs, optional)
    if served.shared_inputs(batched=batched) and (lacking := served.no_batch_axis_reason()):
        raise ModelConfigError(
            f"unable to load model {model!r}: {lacking}. A batched model needs an input with rows, and small shape tensors"
        )
    return IoMapping(served, {**reshapes_in, **reshapes_optional}, reshapes_out)


def _tensors(
    tensors: Sequence[_Tensor], specs: Sequence[TensorSpec], kind: str, model: str, batched: bool
) -> tuple[tuple[TensorSpec, ...], dict[str, Reshape]]:
    by_name = {spec.name: spec for spec in specs}
    served: list[TensorSpec] = []
    reshapes: dict[str, Reshape] = {}
    model_is_batched = batched
    for tensor in tensors:
        spec = by_name.get(tensor.name)
        batched = model_is_batched and not (
            isinstance(tensor, pb.ModelInput) and (tensor.is_shape_tensor or tensor.optional)
        )
        check_tensor(tensor, spec, kind, model, batched)
        if spec is None:
            raise ModelConfigError(
                f"unexpected inference {kind} {tensor.name!r} in the configuration of model {model!r}, allowed "
                f"{kind}s are: {', '.join(by_name)}"
            )
        if any(tensor.name == other.name for other in served):
            raise ModelConfigError(
                f"the configuration of model {model!r} has the {kind} {tensor.name!r} twice"
            )
        expected, provided = pb.DataType.Name(tensor.data_type), type_name(spec)
        if expected != provided:
            raise ModelConfigError(
                f"unable to load model {model!r}, configuration expects datatype {expected} for {kind} "
                f"{tensor.name!r}, model provides {provided}"
            )
        wire = tuple(tensor.dims)
        if batched != model_is_batched and _DYNAMIC in wire and not spec.optional:
            raise ModelConfigError(
                f"model {model!r}, input {tensor.name!r} is a shape tensor and has dims {list(wire)}: the requests of a "
                "batch share it, so its dims must be fixed"
            )
        seen = tuple(tensor.reshape.shape) if tensor.HasField("reshape") else wire
        if spec.any_rank and (seen == wire == (_DYNAMIC,)) and (kind == "output" or not batched):
            served.append(spec)
            continue
        if spec.any_rank:
            # The configuration gives the shape, because the file does not.
            spec = replace(spec, dims=("",) * (len(seen) + batched), any_rank=False)
        elif spec.dims or batched:
            _check_dims(spec, seen, model, batched, exact=kind == "output")
        elif any(dim != 1 for dim in seen):
            raise ModelConfigError(
                f"unable to load model {model!r}, scalar tensor {tensor.name!r}, should only provide 1 in the model "
                f"configuration when the model doesn't support batching. Model configuration provided: {list(seen)}"
            )
        else:
            seen = ()
        if seen != wire:
            reshapes[tensor.name] = Reshape(wire, seen, batched)
        dims = _dims(spec, wire, seen, batched)
        served.append(TensorSpec(spec.name, spec.datatype, dims, optional=spec.optional, binary=spec.binary))
    return tuple(served), reshapes


def _dims(
    spec: TensorSpec, wire: tuple[int, ...], seen: tuple[int, ...], batched: bool
) -> tuple[int | str, ...]:
    """Return the dimensions on the wire. Dynamic dimensions keep their names in the ONNX file."""
    names = spec.dims[int(batched) :]
    if seen != wire:
        names = ("",) * len(wire)
    varying = [name if isinstance(name, str) else "" for name in names]
    dims = tuple(name if dim == _DYNAMIC else dim for dim, name in zip(wire, varying, strict=True))
    return (spec.dims[0], *dims) if batched else dims


def _check_dims(spec: TensorSpec, dims: Sequence[int], model: str, batched: bool, *, exact: bool) -> None:
    shape = spec.shape
    if spec.counts_rows and not batched and dims[:1] == (1,):
        # The shape in the file.
        shape = (1, *shape[1:])
    if batched and shape[:1] != (_DYNAMIC,):
        raise ModelConfigError(
            f"model {model!r}, tensor {spec.name!r}: for the model to support batching the shape should have at least "
            f"1 dimension and the first dimension must be -1; but shape expected by the model is {list(shape)}: "
            "export the model with a dynamic batch axis, or set max_batch_size to 0 and give complete dims"
        )
    full = (_DYNAMIC, *dims) if batched else tuple(dims)
    fits = len(shape) == len(full) and all(
        actual == given or (actual == _DYNAMIC and not exact)
        for actual, given in zip(shape, full, strict=True)
    )
    if not fits:
        how = (
            f"(an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
            f"complete shape {list(full)})"
            if batched
            else f"(shape {list(full)})"
        )
        raise ModelConfigError(
            f"model {model!r}, tensor {spec.name!r}: the model expects {len(shape)} dimensions (shape {list(shape)}) "
            f"but the model configuration specifies {len(full)} dimensions {how}"
        )


def check_tensor(tensor: _Tensor, spec: TensorSpec | None, kind: str, model: str, batched: bool) -> None:
    """Check an entry by itself; ModelConfigError. The shape in the ONNX file is allowed even if a dimension is 0."""
    file_shape = spec.shape[int(batched) :] if spec is not None else None
    if not tensor.name:
        raise ModelConfigError(f"model {kind} must specify 'name' for {model}")
    label = f"model {kind} {tensor.name!r}"
    if tensor.data_type == pb.TYPE_INVALID:
        raise ModelConfigError(f"{label} must specify 'data_type' for {model}")
    if (
        isinstance(tensor, pb.ModelInput)
        and tensor.format != pb.ModelInput.FORMAT_NONE
        and len(tensor.dims) != 3
    ):
        raise ModelConfigError(
            f"model input NHWC/NCHW require 3 dims for {model}, {label} has {list(tensor.dims)}"
        )
    for dims, what in ((tensor.dims, "dimension"), (tensor.reshape.shape, "reshape dimensions")):
        if tuple(dims) != file_shape and any(dim < 1 and dim != _DYNAMIC for dim in dims):
            raise ModelConfigError(
                f"{label} {what} must be integer >= 1, or -1 to indicate a variable-size dimension for {model}, got "
                f"{list(dims)}"
            )
    if not tensor.HasField("reshape"):
        return
    if not tensor.dims:
        raise ModelConfigError(f"{label} must specify 'dims' for {model}, since it has a reshape")
    if not tensor.reshape.shape and not batched:
        raise ModelConfigError(
            f"{label} cannot have empty reshape for non-batching model as scalar tensors are not supported for {model}"
        )
    # The dimensions between dynamic ones must have the same number of elements.
    if _chunks(tensor.dims) != _chunks(tensor.reshape.shape):
        raise ModelConfigError(
            f"{label} has different size for dims and reshape for {model}: {list(tensor.dims)} and "
            f"{list(tensor.reshape.shape)}"
        )


def _chunks(dims: Sequence[int]) -> list[int]:
    """Return the number of elements in each run of fixed dimensions."""
    chunks: list[list[int]] = [[]]
    for dim in dims:
        if dim == _DYNAMIC:
            chunks.append([])
        else:
            chunks[-1].append(dim)
    return [math.prod(chunk) for chunk in chunks]


def _names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in specs) or "none"
