"""The response: the requested outputs, typed if the request was, with a description of the batch on demand.

Responses assembled from bytes parse as those that protobuf writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.server.rig import Array, fp32, reproducible, request, signature, spec

from tensorferry.batcher import BatchInfo, CloseReason, Outcome
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import DATATYPES, decode_contents, decode_raw
from tensorferry.server.errors import ModelFailedError
from tensorferry.server.inference.requests.codec import (
    RequestedOutput,
    ResponseSpec,
    decode_request,
    encode_response,
)
from tensorferry.server.inference.responses.responses import ResponseTemplate, id_field_of
from tensorferry.server.inference.responses.stream_responses import stream_response
from tensorferry.server.inference.shared_memory.regions import RegionLease, Regions

SPECS = {
    "y": spec("y", "FP32", "batch", 3),
    "n": spec("n", "INT64", "batch"),
    "s": spec("s", "BYTES", "batch"),
    "h": spec("h", "FP16", "batch"),
}
ARRAYS: dict[str, Array] = {
    "y": fp32(2, 3),
    "n": np.array([-1, 1 << 62]),
    "s": np.array(["é", "a\0"], dtype=object),
    "h": np.array([1.5, -2], np.float16),
}
BATCH = BatchInfo(9, 3, 7, compute_time=0.0125, reason=CloseReason.FULL, predicted=0.0111, full_rows=8)


def response(
    outputs: str,
    *,
    typed: bool = False,
    requested: str = "",
    arrays: dict[str, Array] = ARRAYS,
    outcome: dict[str, Any] | None = None,
    **fields: Any,
) -> pb.ModelInferResponse:
    """Return the parsed response of a model with these outputs; `requested` names some of them."""
    message = request({"x": fp32(2, 3)}, typed=typed, **fields)
    for name in requested:
        message.outputs.add(name=name)
    made = signature(spec("x", "FP32", "batch", 3), outputs=tuple(SPECS[name] for name in outputs))
    decoded = decode_request(message, "m", made, True, RegionLease(Regions()))
    made_of = Outcome(arrays, None, **(outcome or {"batch": BATCH}))
    template = ResponseTemplate(message.model_name, "4", decoded.response_spec)
    answer = pb.ModelInferResponse()
    for _ in range(2):  # the second time with the constant parts serialised
        answer = pb.ModelInferResponse.FromString(b"".join(template.pieces(id_field_of(message.id), made_of)))
        plain = encode_response(message.model_name, "4", decoded.response_spec, made_of)
        plain.id = message.id
        assert answer == plain
    return answer


def arrays_of(answer: pb.ModelInferResponse) -> dict[str, Any]:
    raws = answer.raw_output_contents
    assert not raws or len(raws) == len(answer.outputs)
    return {
        tensor.name: (
            decode_raw(raws[at], DATATYPES[tensor.datatype], tensor.shape)
            if raws
            else decode_contents(tensor.contents, DATATYPES[tensor.datatype], tensor.shape)
        ).tolist()
        for at, tensor in enumerate(answer.outputs)
    }


EXPECTED = {"y": [[0, 1, 2], [3, 4, 5]], "n": [-1, 1 << 62], "s": ["é".encode(), b"a\0"], "h": [1.5, -2]}


def test_all_outputs_raw() -> None:
    answer = response("ynsh", id="seven")
    assert arrays_of(answer) == EXPECTED
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "4", "seven")
    assert [(t.name, t.datatype, list(t.shape)) for t in answer.outputs] == [
        ("y", "FP32", [2, 3]),
        ("n", "INT64", [2]),
        ("s", "BYTES", [2]),
        ("h", "FP16", [2]),
    ]
    assert not any(tensor.HasField("contents") for tensor in answer.outputs)
    assert not answer.parameters


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.array(["é", "a\0"], object), ["é".encode(), b"a\0"]),
        (np.array([b"\xff\xd8", b"a\0"], object), [b"\xff\xd8", b"a\0"]),
        (np.array(["é", b"\xff"], object), ["é".encode(), b"\xff"]),
        (np.array(["é", "longer"]), ["é".encode(), b"longer"]),
        (np.array([b"\xff", b"longer"]), [b"\xff", b"longer"]),
        # numpy 1 has no T.
        (np.array(["é", "longer"], "U" if np.__version__ < "2" else "T"), ["é".encode(), b"longer"]),
    ],
    ids=["str", "bytes", "both", "U", "S", "T"],
)
def test_strings_of_every_form_are_answered(given: Array, expected: list[bytes], typed: bool) -> None:
    answer = response("s", typed=typed, arrays={"s": given})
    assert arrays_of(answer) == {"s": expected}
    assert (answer.outputs[0].datatype, bool(answer.raw_output_contents)) == ("BYTES", not typed)


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("element", [5, "\ud800"], ids=["a number", "a lone surrogate"])
def test_elements_that_are_no_strings_are_an_error_of_the_model(element: Any, typed: bool) -> None:
    with pytest.raises(ModelFailedError, match="output 's': an element of a BYTES tensor"):
        response("s", typed=typed, arrays={"s": np.array([element, ""], object)})


def test_a_typed_request_is_answered_raw_if_a_requested_output_has_no_typed_form() -> None:
    answer = response("yh", typed=True)
    assert len(answer.raw_output_contents) == 2
    assert not any(tensor.HasField("contents") for tensor in answer.outputs)
    assert arrays_of(answer) == {name: EXPECTED[name] for name in "yh"}
    assert not response("yh", typed=True, requested="y").raw_output_contents
    assert response("yh", typed=True, requested="h").raw_output_contents


def batch_description(value: bool | int, **outcome: Any) -> dict[str, int | str]:
    parameter = (
        pb.InferParameter(bool_param=value) if isinstance(value, bool) else pb.InferParameter(int64_param=1)
    )
    answer = response("y", parameters={"explain": parameter}, outcome=outcome)
    return {name: getattr(p, str(p.WhichOneof("parameter_choice"))) for name, p in answer.parameters.items()}


def test_a_request_gets_a_description_of_its_batch_on_demand() -> None:
    assert batch_description(True, batch=BATCH, queue_delay=0.0021, position=2) == {
        "batch_number": 9,
        "batch_requests": 3,
        "batch_rows": 7,
        "full_batch_rows": 8,
        "position": 2,
        "priority": 1,
        "queue_us": 2100,
        "compute_us": 12500,
        "predicted_us": 11100,
        "close_reason": "full",
    }


def test_no_description_without_demand_or_batch() -> None:
    assert batch_description(False, batch=BATCH) == {}
    assert batch_description(1, batch=BATCH) == {}
    assert batch_description(True, batch=None) == {}


RAW = [name for name, datatype in DATATYPES.items() if datatype.size]


@st.composite
def drawn_arrays(draw: Any, datatype: str, rows: int) -> Array:
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
def drawn_outputs(draw: Any) -> tuple[ResponseSpec, list[dict[str, Array]], list[str]]:
    """A response spec, the outputs of several runs, and request ids."""
    names = draw(st.lists(st.text("xyz_0", min_size=1, max_size=5), min_size=1, max_size=4, unique=True))
    kinds = {name: draw(st.sampled_from(RAW)) for name in names}
    runs = [
        {name: draw(drawn_arrays(kind, draw(st.integers(0, 3)))) for name, kind in kinds.items()}
        for _ in range(3)
    ]
    specs = tuple(RequestedOutput(spec(name, kind, "batch")) for name, kind in kinds.items())
    ids = draw(st.lists(st.text(max_size=200), min_size=3, max_size=3))
    return ResponseSpec(specs, typed=False, explain=False), runs, ids


@given(drawn_outputs())
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
        "model",
        "1",
        ResponseSpec((RequestedOutput(spec("y", "FP32", "batch", "n")),), typed=False, explain=False),
    )
    for columns in range(200):
        outcome = Outcome({"y": np.zeros((1, columns), np.float32)})
        response = pb.ModelInferResponse.FromString(b"".join(template.pieces(b"", outcome)))
        assert list(response.outputs[0].shape) == [1, columns]
        assert len(template._constant_parts) <= 64
