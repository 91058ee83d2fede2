"""A case in ONNX Runtime alone, without a server; the server must support exactly these cases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from conformance.cases import Array, Case, session_of
from conformance.compare import difference

# ONNX Runtime's names of the types that have a datatype in the protocol.
_CARRIED = re.compile(r"tensor\((bool|u?int(8|16|32|64)|b?float16|float|double|string)\)")
_BFLOAT16 = 16  # TensorProto.BFLOAT16


def excluded(case: Case) -> str | None:
    """Return why the case is not for the server; None if ONNX Runtime passes it."""
    try:
        session = session_of(case.model)
    except Exception as error:
        return f"ONNX Runtime cannot load it: {_short(error)}"
    for kind, nodes in (("input", session.get_inputs()), ("output", session.get_outputs())):
        for node in nodes:
            if not _CARRIED.fullmatch(node.type):
                return f"the protocol has no datatype for {kind}s of {_generic(node.type)}"
    for data in case.data:
        feed = {node.name: data.inputs[node.name] for node in session.get_inputs()}
        if not all(isinstance(value, np.ndarray) for value in feed.values()):
            return "an input is left empty, which the protocol has no form for"
        try:
            answer = _run(session, feed, data.outputs)
        except Exception as error:
            return f"ONNX Runtime does not run it: {_short(error)}"
        for name, expected in data.outputs.items():
            differs = difference(case, name, expected, answer[name])
            if differs:
                return f"ONNX Runtime by itself answers otherwise: {differs}"
    return None


def _run(session: Any, feed: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Array]:
    nodes = (*session.get_inputs(), *session.get_outputs())
    if not any(node.type == "tensor(bfloat16)" for node in nodes):
        names = list(expected)
        return dict(zip(names, map(np.asarray, session.run(names, dict(feed))), strict=True))
    # ONNX Runtime takes bfloat16 not as numpy arrays, but as memory.
    binding = session.io_binding()
    for name, array in feed.items():
        if array.dtype == ml_dtypes.bfloat16:
            bits = np.ascontiguousarray(array).view(np.uint16)
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _BFLOAT16)
            binding.bind_ortvalue_input(name, value)
        else:
            binding.bind_cpu_input(name, array)
    answer = {name: np.zeros_like(array) for name, array in expected.items()}
    for name, array in answer.items():
        kind: Any = _BFLOAT16 if array.dtype == ml_dtypes.bfloat16 else array.dtype.type
        binding.bind_output(name, "cpu", 0, kind, array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    return answer


def _generic(kind: str) -> str:
    """Reduce sequences, maps and optionals of any tensors to one reason."""
    return re.match(r"(seq|map|optional)", kind)[1] + "(...)" if not kind.startswith("tensor") else kind  # type: ignore[index]


def _short(error: Exception) -> str:
    """Return ONNX Runtime's reason without the location in its source."""
    text = " ".join(str(error).split()).removeprefix("[ONNXRuntimeError] : ")
    place = re.search(r"\S*/\S+\.(cc|h|hpp|cpp):\d+ ", text)
    if place is not None:
        _, found, rest = text[place.end() :].partition(") ")
        text = text[: place.start()] + (rest if found else text[place.end() :])
    return text[:200]
