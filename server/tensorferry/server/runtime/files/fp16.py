"""Conversion of a model to FP16 when it is loaded, and a check of its accuracy."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.onnx.graph.model_file import all_nodes, tensors_in
from tensorferry.server.onnx.graph.rewriting.changes import write_freed
from tensorferry.server.runtime.checks.sampling import Array, Run, greatest_difference
from tensorferry.server.runtime.files.load_remedies import remedy_for
from tensorferry.server.runtime.files.op_libraries import OWN_DOMAINS, OpLibrary, register
from tensorferry.server.runtime.ort import onnxruntime, ort_message
from tensorferry.server.runtime.ort_options import Fp16, OrtOptions
from tensorferry.server.runtime.session import Session
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.server.system.install_command import install_command
from tensorferry.server.system.scratch_directory import ScratchDirectory

if TYPE_CHECKING:
    import onnx

_log = logging.getLogger("tensorferry.server")

# For `ModelFile.changes`.
_REWRITTEN = ("rewritten with a variable batch axis", "--batching-rewrite false serves it as it is")
IN_FP16 = (
    "converted to FP16",
    "disable FP16, or name the operators or nodes that must stay in FP32, by the parameter fp16_except of its "
    "configuration",
)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """File that sessions load: the model's own (`source`), or its conversion (`path`).

    `changes` are words for the conversion and for how to go without it; empty if there is none.
    """

    source: Path
    path: Path
    changes: tuple[str, str] = ("", "")

    def session(self, device: str, settings: OrtOptions) -> Session:
        """Create a session. StartError as for Session, with the name of the model's own file."""
        try:
            return Session(self.path, device, settings)
        except StartError as error:
            if self.path == self.source:
                raise
            reason = str(error).removeprefix(f"{self.path}: ").replace(str(self.path), str(self.source))
            what, cure = self.changes
            raise StartError(f"{self.source}: {what}, {reason}; {cure}") from error


def model_file(source: Path, settings: OrtOptions, scratch: ExitStack) -> ModelFile:
    """Return the file for sessions, changed as the options say. A changed file is removed with `scratch`.

    StartError if that fails.
    """
    file = ModelFile(source, source)
    if settings.freed is not None:
        path = _folder(scratch) / source.name
        try:
            write_freed(source, settings.freed, path)
        # Besides NotFreed and OSError, onnx and protobuf raise many kinds of exceptions.
        except Exception as error:
            raise StartError(
                f"{source}: no copy with a variable first axis could be written: {error}"
            ) from error
        file = ModelFile(source, path, _REWRITTEN)
    if settings.fp16 is not None:
        converted = convert_to_fp16(file.path, settings.fp16, _folder(scratch), settings.op_libraries)
        if converted is not None:
            file = ModelFile(source, converted, IN_FP16)
    return file


def _folder(scratch: ExitStack) -> Path:
    folder = ScratchDirectory()
    scratch.callback(folder.remove)
    return folder.path


def convert_to_fp16(
    source: Path, fp16: Fp16, folder: Path, libraries: Sequence[OpLibrary] = ()
) -> Path | None:
    """Write the model to a folder in FP16. Its inputs and outputs keep their datatypes; custom operators stay in FP32.

    The folder must exist until the last session has been created. None if there is nothing to convert. StartError if the
    conversion fails.
    """
    if not source.is_file():
        # `Session` reports the missing file.
        return None
    try:
        import onnx

        converter = _converter()
    except ImportError as error:
        raise StartError(
            f"{source}: conversion to FP16 needs {error.name or 'a package'}, which is missing: "
            f"{install_command('fp16')} has it"
        ) from None
    try:
        model = _read_model(source, libraries)
        if not any(tensor.data_type == onnx.TensorProto.FLOAT for tensor in tensors_in(model)):
            _log.warning("%s has no weights in FP32: it is served without conversion", source)
            return None
        nodes = list(all_nodes(model.graph.node))
        known = {name for node in nodes for name in (node.op_type, node.name)}
        for name in fp16.excepted:
            if name not in known:
                _log.warning("%s has no operator or node %r: the name has no effect", source, name)
        converted = converter.convert_float_to_float16(
            model,
            keep_io_types=True,
            disable_shape_infer=True,
            op_block_list=[
                *converter.DEFAULT_OP_BLOCK_LIST,
                *fp16.excepted,
                *{node.op_type for node in nodes if _is_custom(node)},
            ],
            node_block_list=list(fp16.excepted),
        )
        path = folder / "model.onnx"
        # Weights go to a second file, because a protobuf file is limited to 2 GB.
        onnx.save_model(converted, str(path), save_as_external_data=True, location="weights")
    except StartError:
        raise
    # The converter raises AssertionError, and onnx many kinds of exceptions.
    except Exception as error:
        raise StartError(f"{source}: conversion to FP16 failed: {error!r}; disable FP16") from error
    return path


def _converter() -> Any:
    """Import ONNX Runtime's converter, and remove the folder that its package adds to sys.path."""
    before = list(sys.path)
    from onnxruntime.transformers import float16

    added = str(Path(float16.__file__).parent)
    if added in sys.path and added not in before:
        sys.path.remove(added)
    return float16


def _read_model(source: Path, libraries: Sequence[OpLibrary]) -> onnx.ModelProto:
    """Read the model with its weights, and infer the datatype of each value, which the converter needs."""
    import onnx
    from onnx.external_data_helper import load_external_data_for_model
    from onnx.inliner import inline_local_functions

    model = onnx.load(str(source), load_external_data=False)
    if model.functions:
        # The converter ignores functions.
        model = inline_local_functions(model)
    for node in all_nodes(model.graph.node):
        _as_tensor(node)
    # Weights that are also listed as inputs (by old exporters) would stay in FP32.
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if len(inputs) < len(model.graph.input):
        # Before version 4, all weights had to be listed.
        if model.ir_version >= 4:
            optional = sorted(weights & {value.name for value in model.graph.input})
            _log.warning(
                "%s: converted to FP16 it has no optional inputs; clients cannot send its %d, such as %r",
                source,
                len(optional),
                optional[0],
            )
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = max(model.ir_version, 4)
    # Before external weights are loaded, because shape inference is limited to 2 GB.
    _add_types_of_custom_operators(model, source, libraries)
    model = onnx.shape_inference.infer_shapes(model)
    load_external_data_for_model(model, str(source.parent))
    return model


def _is_custom(node: onnx.NodeProto) -> bool:
    return node.domain not in OWN_DOMAINS


def _add_types_of_custom_operators(
    model: onnx.ModelProto, source: Path, libraries: Sequence[OpLibrary]
) -> None:
    """Add the datatypes of the outputs of custom operators. Only ONNX Runtime, with the libraries, knows them.

    StartError if ONNX Runtime cannot load the model on the CPU.
    """
    import onnx

    known = {value.name for value in (*model.graph.value_info, *model.graph.output)}
    custom = [name for node in model.graph.node if _is_custom(node) for name in node.output]
    names = [name for name in custom if name and name not in known]
    if not names:
        return
    declared = len(model.graph.output)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    content = model.SerializeToString()
    del model.graph.output[declared:]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(source.parent)
    )
    register(options, libraries)
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        reason = ort_message(error)
        remedy = remedy_for(source, reason, libraries)
        raise StartError(f"{source}: ONNX Runtime cannot load it on the CPU: {reason}{remedy}") from error
    for output in session.get_outputs()[declared:]:
        # Such as tensor(float), whose name in the file is FLOAT.
        if found := re.fullmatch(r"tensor\((\w+)\)", output.type):
            datatype = onnx.TensorProto.DataType.Value(found[1].upper())
            model.graph.value_info.append(onnx.helper.make_tensor_value_info(output.name, datatype, None))


def _as_tensor(node: onnx.NodeProto) -> None:
    """Replace a constant's number or list of numbers by a tensor, because only tensors are converted."""
    import onnx

    for attribute in node.attribute if node.op_type == "Constant" else ():
        if attribute.name in ("value_float", "value_floats"):
            array = np.array(onnx.helper.get_attribute_value(attribute), np.float32)
            attribute.CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(array)))


def check_accuracy(
    name: str,
    signature: Signature,
    run: Run,
    reference: Run,
    inputs: Sequence[Mapping[str, Array]],
    tolerance: float,
) -> None:
    """Compare a model in FP16 with the same model in FP32, and log the greatest difference.

    StartError if an output of floats differs by more than the tolerance (relative to its greatest magnitude), if values
    become infinite or NaN, or if the model fails in FP16 only. Differences in other datatypes are logged, because a
    class may change when two are nearly equal.
    """
    worst, where, compared = 0.0, "", 0
    others: dict[str, float] = {}
    for given in inputs:
        try:
            expected = reference(given)
        except ModelFailedError:
            # Random input may be invalid for this model.
            continue
        try:
            got = run(given)
        except ModelFailedError as error:
            raise StartError(f"model {name!r} runs in FP32, but not in FP16: {error}") from error
        for spec in signature.outputs:
            difference = _relative_difference(spec, expected[spec.name], got[spec.name])
            if not spec.is_float:
                others[spec.name] = max(others.get(spec.name, 0.0), difference)
            elif difference >= worst:
                worst, where = difference, spec.name
        compared += 1
    if not compared:
        _log.warning(
            "model %s in FP16 was not compared with FP32, because it does not run on random input; add samples to its "
            "configuration (model_warmup)",
            name,
        )
        return
    if not worst <= tolerance:
        by = f"by {worst:.2g} of its greatest magnitude" if math.isfinite(worst) else "where it is finite"
        raise StartError(
            f"model {name!r} in FP16: output {where!r} differs from FP32 {by}, which is more than the tolerance, "
            f"{tolerance:g}; disable FP16, name the operators or nodes that must stay in FP32 by the parameter fp16_except of "
            "its configuration, or raise --fp16-tolerance (there: the parameters fp16 and fp16_tolerance)"
        )
    if where:
        _log.info(
            "model %s in FP16: outputs differ from FP32 by at most %.2g of their greatest magnitude (%s), over %d inputs",
            name,
            worst,
            where,
            compared,
        )
    for output, share in others.items():
        level = logging.WARNING if share else logging.INFO
        _log.log(level, "model %s in FP16: %.2g %% of output %s differ from FP32", name, 100 * share, output)


def _relative_difference(spec: TensorSpec, expected: Array, got: Array) -> float:
    """Return the relative difference of floats, or the share of other values that differ; inf if not comparable."""
    if expected.shape != got.shape:
        return math.inf
    if not spec.is_float:
        return float(np.count_nonzero(expected != got)) / max(1, expected.size)
    found = greatest_difference(spec, expected, got)
    return math.inf if found is None else found[0] / (found[1] or 1.0)
