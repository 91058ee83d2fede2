"""Text in the parameters of a BYTES input, which JSON clients such as grpcurl can write."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import json_format
from support.server.rig import signature, spec

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import TensorError
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.inference.requests.codec import DecodedRequest, decode_request
from tensorferry.server.inference.shared_memory.regions import RegionLease, Regions
from tensorferry.server.signature import Signature

S = spec("s", "BYTES", "batch")
E_ACUTE = "\N{LATIN SMALL LETTER E WITH ACUTE}"


def message(parameters: dict[str, str], *shape: int, datatype: str = "BYTES") -> pb.ModelInferRequest:
    """A request as grpcurl makes it of JSON."""
    given = {key: {"string_param": value} for key, value in parameters.items()}
    tensor = {"name": "s", "datatype": datatype, "shape": list(shape), "parameters": given}
    return json_format.ParseDict({"model_name": "m", "inputs": [tensor]}, pb.ModelInferRequest())


def decoded(request: pb.ModelInferRequest, made: Signature) -> DecodedRequest:
    return decode_request(request, "m", made, True, RegionLease(Regions()))


def refused(request: pb.ModelInferRequest, made: Signature) -> str:
    with pytest.raises((InvalidRequestError, TensorError)) as caught:
        decoded(request, made)
    return str(caught.value)


@pytest.mark.parametrize("key", ["text", "text_0"])
def test_one_text(key: str) -> None:
    request = decoded(message({key: f"caf{E_ACUTE}\0"}, 1), signature(S))
    assert request.tensors[0].data.tolist() == [f"caf{E_ACUTE}\0"]
    assert (request.tensors[0].shape, request.tensors[0].dtype) == ((1,), np.dtype(object))
    assert request.rows == 1
    assert request.response_spec.typed


def test_texts_are_in_the_order_of_their_numbers() -> None:
    texts = {f"text_{number}": str(number) for number in reversed(range(12))}
    (tensor,) = decoded(message(texts, 12), signature(S)).tensors
    assert tensor.data.tolist() == [str(number) for number in range(12)]
    (tensor,) = decoded(message(texts, 3, 4), signature(spec("s", "BYTES", "batch", 4))).tensors
    assert tensor.data.tolist() == [[str(row * 4 + at) for at in range(4)] for row in range(3)]


def test_other_parameters_are_ignored() -> None:
    parameters = {"text": "a", "text_encoding": "utf-8", "texts": "b", "text_1b": "c", "content_type": "str"}
    assert decoded(message(parameters, 1), signature(S)).tensors[0].data.tolist() == ["a"]
    parameters.pop("text")
    assert "it has neither contents nor an entry" in refused(message(parameters, 1), signature(S))


@pytest.mark.parametrize(
    ("parameters", "shape", "expected"),
    [
        (["text", "text_0"], 2, "input 's' has the parameters text, text_0; give 'text' for one element, or 'text_0',"),
        (["text_0", "text_2"], 2, "input 's' has the parameters text_0, text_2; give 'text'"),
        (["text_00"], 1, "input 's' has the parameters text_00; give 'text'"),
        (["text"], 2, "input 's' of model 'm': shape [2] takes 2 elements, got 1 in text parameters"),
        (["text_0", "text_1"], 1, "shape [1] takes 1 elements, got 2 in text parameters"),
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_do_not_fit_the_shape_are_refused(parameters: list[str], shape: int, expected: str) -> None:
    assert expected in refused(message(dict.fromkeys(parameters, "a"), shape), signature(S))


def test_text_and_contents_of_one_input_are_refused() -> None:
    request = message({"text": "a"}, 1)
    request.inputs[0].contents.bytes_contents.append(b"a")
    assert "text parameters must not be specified when using contents for input 's'" in refused(
        request, signature(S)
    )


def test_text_is_for_bytes_only() -> None:
    request = message({"text": "5"}, 1, datatype="INT64")
    expected = (
        "input 's' of model 'm': text parameters are for BYTES only, and the datatype is INT64: use contents"
    )
    assert refused(request, signature(spec("s", "INT64", "batch"))) == expected
