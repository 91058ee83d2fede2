"""Classification: what is asked for, and the classes of a result."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from client.calls import call
from client.scripted import ScriptedServer

from tensorferry.client import Classification, ClassScore, InferenceClient, InvalidInput, StreamRequest
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors

IMAGES = {"image": np.zeros((2, 8, 8), np.uint8)}


def answering(server: ScriptedServer, rows: Any) -> list[pb.ModelInferRequest]:
    """Let the server answer with these strings; return the list of its requests."""
    requests: list[pb.ModelInferRequest] = []

    def infer(request: pb.ModelInferRequest, context: object = None) -> pb.ModelInferResponse:
        requests.append(request)
        answer = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        array = np.array(rows, object)
        answer.outputs.add(name="image", datatype="BYTES", shape=array.shape)
        answer.raw_output_contents.append(tensors.encode_raw(array))
        return answer

    server.servicer.infer = infer
    server.servicer.stream = lambda given, context: (
        pb.ModelStreamInferResponse(infer_response=infer(request)) for request in given
    )
    return requests


@pytest.mark.parametrize("method", ["infer", "submit", "stream"])
def test_classes_of_each_row(server: ScriptedServer, client: InferenceClient, method: str) -> None:
    rows = [[b"0.75:3:three", b"0.25:1:one:or:so"], [b"12:0", b"-1.5e+03:9:"]]
    requests = answering(server, rows)
    outputs = {"image": Classification(2)}
    sent = [StreamRequest(IMAGES, outputs=outputs)] if method == "stream" else IMAGES
    options = {} if method == "stream" else {"outputs": outputs}
    result = call(client, method, "digits", sent, **options)
    result = result[0] if method == "stream" else result
    assert requests[0].outputs[0].parameters["classification"].int64_param == 2
    assert result.classes("image") == [
        [ClassScore(0.75, 3, "three"), ClassScore(0.25, 1, "one:or:so")],
        [ClassScore(12.0, 0, ""), ClassScore(-1500.0, 9, "")],
    ]


def test_a_model_without_batch_axis_has_one_row(server: ScriptedServer, client: InferenceClient) -> None:
    answering(server, [b"nan:4:\xff"])
    result = client.infer("digits", IMAGES, outputs={"image": Classification(1)})
    [[only]] = result.classes("image")
    assert np.isnan(only.score)
    assert (only.index, only.label) == (4, "\udcff")


def test_outputs_can_be_a_dict_without_classes(server: ScriptedServer, client: InferenceClient) -> None:
    client.infer("digits", IMAGES, outputs={"image": None})
    assert server.servicer.requests[0].outputs == [
        pb.ModelInferRequest.InferRequestedOutputTensor(name="image")
    ]


@pytest.mark.parametrize("rows", [[b"0.5"], [b"x:1"], [b"1:x"], [b""]])
def test_other_strings_are_no_classes(
    server: ScriptedServer, client: InferenceClient, rows: list[bytes]
) -> None:
    answering(server, rows)
    server.servicer.models["digits"].outputs[0].datatype = "BYTES"
    result = client.infer("digits", IMAGES)
    with pytest.raises(InvalidInput, match=re.escape(f"got the element {rows[0]!r}: ask for them with")):
        result.classes("image")


def test_values_are_no_classes(client: InferenceClient) -> None:
    result = client.infer("digits", IMAGES)
    with pytest.raises(InvalidInput, match=r"output 'image' expects classes.*got uint8 \[2, 8, 8\]"):
        result.classes("image")


@pytest.mark.parametrize("count", [0, -1, True, "3", 1.5, 2**63])
def test_wrong_counts_are_refused(count: Any) -> None:
    with pytest.raises(InvalidInput, match="Classification expects an int from 1"):
        Classification(count)


@pytest.mark.parametrize("outputs", [{"image": 3}, {"image": "3"}])
def test_wrong_choices_are_refused(client: InferenceClient, outputs: Any) -> None:
    with pytest.raises(InvalidInput, match="output 'image' expects a Classification, or None"):
        client.infer("digits", IMAGES, outputs=outputs)
