"""Backend tests of the `onnx` package: a model, inputs, and the outputs of ONNX's reference.

Importing the package's modules makes the node tests, several for each operator; the others are
files.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import numpy_helper

Array = npt.NDArray[Any]
# A tensor, or a value without a form in the protocol: a sequence, or an empty optional.
Value = Array | Sequence[Any] | None

_NODES = "onnx.backend.test.case.node"
_DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
# Kinds with models and data in files, without downloads.
STORED = ("simple", "pytorch-operator", "pytorch-converted")
# Default tolerances of the onnx package.
_RTOL, _ATOL = 1e-3, 1e-7


@dataclass(frozen=True, slots=True)
class DataSet:
    """Values of the model's inputs and outputs, by name."""

    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its expected outputs; `rtol` and `atol` are the case's own tolerance."""

    name: str
    kind: str
    model: onnx.ModelProto
    data: tuple[DataSet, ...]
    rtol: float = _RTOL
    atol: float = _ATOL


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Return a session on one thread of the CPU that logs nothing."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def all_cases() -> list[Case]:
    """Return every case, by kind and name."""
    stored = [case for kind in STORED for case in _stored(kind)]
    return sorted((*node_cases(), *stored), key=lambda case: (case.kind, case.name))


def node_cases(modules: Iterable[str] | None = None) -> list[Case]:
    """Return the node tests of these modules of the onnx package; by default of all, in many seconds."""
    from onnx.backend.test.case.node import _NodeTestCases, collect_testcases

    # numpy warns of numbers in some cases on purpose.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if modules is None:
            collect_testcases()
        else:
            for module in modules:
                importlib.import_module(f"{_NODES}.{module}")
    return [_node_case(made) for made in _NodeTestCases]


def _node_case(made: Any) -> Case:
    graph = made.model.graph
    data = tuple(
        DataSet(_named(graph.input, inputs), _named(graph.output, outputs))
        for inputs, outputs in made.data_sets
    )
    return Case(made.name, "node", made.model, data, made.rtol, made.atol)


def _stored(kind: str) -> list[Case]:
    cases = []
    for folder in sorted((_DATA / kind).iterdir()):
        if not (folder / "model.onnx").is_file():
            continue
        model = onnx.load(str(folder / "model.onnx"))
        graph = model.graph
        data = tuple(
            DataSet(_read(graph.input, one, "input"), _read(graph.output, one, "output"))
            for one in sorted(folder.glob("test_data_set_*"))
        )
        cases.append(Case(folder.name, kind, model, data))
    return cases


def _read(declared: Sequence[onnx.ValueInfoProto], folder: Path, kind: str) -> dict[str, Value]:
    values: list[Value] = []
    for at in range(len(list(folder.glob(f"{kind}_*.pb")))):
        content = (folder / f"{kind}_{at}.pb").read_bytes()
        if declared[at].type.HasField("tensor_type"):
            values.append(numpy_helper.to_array(onnx.TensorProto.FromString(content)))
        else:
            sequence = onnx.SequenceProto.FromString(content)
            values.append([numpy_helper.to_array(tensor) for tensor in sequence.tensor_values])
    return _named(declared, values)


def _named(declared: Sequence[onnx.ValueInfoProto], values: Iterable[Any]) -> dict[str, Value]:
    """Return the values by the names of inputs or outputs; the last, which have defaults, may be missing."""
    return {info.name: _value(value) for info, value in zip(declared, values, strict=False)}


def _value(value: Any) -> Value:
    if value is None or isinstance(value, (list, tuple, dict)):
        return value  # type: ignore[return-value]
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "SU" else array


def opened(case: Case) -> Case | None:
    """Return the case with dynamic first axes, as an exporter with a batch axis writes it.

    The server must find out whether they are batch axes; for many operators they are not. None for
    a model with a scalar or no input, or with dynamic first axes.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    # The value infos of inner tensors have the sizes that become dynamic here.
    del model.graph.value_info[:]
    if not model.graph.input:
        return None
    for info in (*model.graph.input, *model.graph.output):
        dims = info.type.tensor_type.shape.dim
        if not dims or not dims[0].dim_value:
            return None
        dims[0].dim_param = "batch"
    return replace(case, name=f"{case.name}.open", model=model)
