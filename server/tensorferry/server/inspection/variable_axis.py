"""A copy of a model with a variable first axis, to find out whether changing the file's shapes is enough."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from pathlib import Path

import onnx
from onnx import external_data_helper
from onnx.tools.update_model_dims import update_inputs_outputs_dims

from tensorferry.server.batching_check.cures import fixed_first_axes
from tensorferry.server.signature import Signature

_AXIS = "batch"

# Dimensions of tensors by name; -1 is a variable one without a name.
_Dims = dict[str, list[int | str]]


class NoCopy(Exception):
    """The file cannot be changed; the message says why."""


def write_copy(path: Path, signature: Signature, target: Path, made: Path | None = None) -> str:
    """Write the model with a variable first axis; return a command that does the same. NoCopy if it is not possible.

    The command writes the file `made`, by default one beside the model. All inputs and outputs get it whose first dimension is that of the first tensor with a fixed one.
    """
    fixed = fixed_first_axes((*signature.inputs, *signature.outputs))
    if not fixed:
        raise NoCopy("no first dimension is fixed")
    rows = fixed[0].dims[0]
    names = {spec.name for spec in fixed if spec.dims[0] == rows}
    model = onnx.load(str(path), load_external_data=False)
    if any(map(external_data_helper.uses_external_data, model.graph.initializer)):
        raise NoCopy("its weights are in files of their own")
    inputs, outputs = _dims_of(model.graph.input, names), _dims_of(model.graph.output, names)
    try:
        onnx.save(update_inputs_outputs_dims(model, inputs, outputs), str(target))
    except Exception as error:
        raise NoCopy(" ".join(str(error).split())) from error
    return _command(path, inputs, outputs, made or path.with_name(copy_name(path)))


def copy_name(path: Path) -> str:
    """Return the name of the file that the command makes."""
    return f"{path.stem}-batch{path.suffix}"


def _dims_of(tensors: Collection[onnx.ValueInfoProto], names: Collection[str]) -> _Dims:
    """Return the dimensions of tensors, with the variable axis for those named."""
    found: _Dims = {}
    for tensor in tensors:
        dims: list[int | str] = []
        for dim in tensor.type.tensor_type.shape.dim:
            dims.append(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or -1)
        if tensor.name in names:
            dims[0] = _AXIS
        found[tensor.name] = dims
    return found


def _command(path: Path, inputs: _Dims, outputs: _Dims, made: Path) -> str:
    def literal(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    code = (
        "import onnx; from onnx.tools.update_model_dims import update_inputs_outputs_dims as update; "
        f"onnx.save(update(onnx.load({literal(str(path))}), {literal(inputs)}, {literal(outputs)}), {literal(str(made))})"
    )
    return f"python -c {shlex.quote(code)}"
