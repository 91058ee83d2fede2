"""Responses assembled from bytes parse as those that protobuf writes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.server.rig import Array, reproducible, spec

from tensorferry.batcher import Outcome
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.inference.requests.codec import ResponseSpec, encode_response
from tensorferry.server.inference.responses.responses import ResponseTemplate, id_field_of
from tensorferry.server.inference.responses.stream_responses import stream_response

RAW = [name for name, datatype in DATATYPES.items() if datatype.size]


@st.composite
def arrays(draw: Any, datatype: str, rows: int) -> Array:
    """An array of a datatype's storage, not always contiguous."""
    storage = DATATYPES[datatype].storage
    shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
    whole = (2 * shape[0] + 1, *shape[1:])
    count = int(np.prod(whole))
    seed = draw(st.integers(0, 1 << 32))
    data = np.random.default_rng(seed).integers(0, 256, count * storage.itemsize, np.uint8)
    array = (data[:count] & 1).astype(bool) if datatype == "BOOL" else data.view(storage)
    array = array.reshape(whole)
    layout = draw(st.sampled_from(["contiguous", "a slice", "every other row", "column-major", "reversed"]))
    if layout == "every other row":
        return array[: 2 * rows : 2]
    if layout == "column-major":
        return np.asfortranarray(array[:rows])
    if layout == "reversed":
        return array[:rows][::-1]
    return array[1 : 1 + rows] if layout == "a slice" else np.ascontiguousarray(array[:rows])


@st.composite
def outputs(draw: Any) -> tuple[ResponseSpec, list[dict[str, Array]], list[str]]:
    """A response spec, the outputs of several runs, and request ids."""
    names = draw(st.lists(st.text("xyz_0", min_size=1, max_size=5), min_size=1, max_size=4, unique=True))
    kinds = {name: draw(st.sampled_from(RAW)) for name in names}
    runs = [
        {name: draw(arrays(kind, draw(st.integers(0, 3)))) for name, kind in kinds.items()} for _ in range(3)
    ]
    specs = tuple(spec(name, kind, "batch") for name, kind in kinds.items())
    ids = draw(st.lists(st.text(max_size=200), min_size=3, max_size=3))
    return ResponseSpec(specs, typed=False, explain=False), runs, ids


@given(outputs())
@settings(reproducible, max_examples=100)
def test_responses_parse_as_those_of_protobuf(
    drawn: tuple[ResponseSpec, list[dict[str, Array]], list[str]],
) -> None:
    response_spec, runs, ids = drawn
    template = ResponseTemplate("model", "3", response_spec)
    for arrays_of_run, request_id in [*zip(runs, ids, strict=True)] * 2:
        outcome = Outcome(arrays_of_run)
        expected = encode_response("model", "3", response_spec, outcome)
        expected.id = request_id
        pieces = template.pieces(id_field_of(request_id), outcome)
        assert pb.ModelInferResponse.FromString(b"".join(pieces)) == expected
        expected.parameters["triton_final_response"].bool_param = True
        streamed = pb.ModelStreamInferResponse.FromString(b"".join(stream_response(pieces)))
        assert streamed == pb.ModelStreamInferResponse(infer_response=expected)


def test_kept_shapes_are_bounded() -> None:
    template = ResponseTemplate(
        "model", "1", ResponseSpec((spec("y", "FP32", "batch", "n"),), typed=False, explain=False)
    )
    for columns in range(200):
        outcome = Outcome({"y": np.zeros((1, columns), np.float32)})
        response = pb.ModelInferResponse.FromString(b"".join(template.pieces(b"", outcome)))
        assert list(response.outputs[0].shape) == [1, columns]
        assert len(template._constant_parts) <= 64
