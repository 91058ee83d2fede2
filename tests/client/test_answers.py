"""Answers are compared with their requests, and with the metadata of their model; classes of a result."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from client.calls import call
from client.scripted import Requests, ScriptedServer, echo, model

from tensorferry.client import (
    Classification,
    ClassScore,
    InferenceClient,
    InferenceError,
    InferenceResult,
    Internal,
    InvalidInput,
    StreamRequest,
)
from tensorferry.client.threads.stream import _RequestFeed
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import tensors

METHODS = ["infer", "submit", "stream"]
X = {"x": np.arange(6, dtype=np.float32).reshape(3, 2)}
Change = Callable[[pb.ModelInferResponse], None]


def answering(server: ScriptedServer, change: Change) -> list[pb.ModelInferRequest]:
    """Let the server change its answers; return the list of its requests."""
    requests: list[pb.ModelInferRequest] = []

    def infer(request: pb.ModelInferRequest, context: Any = None) -> pb.ModelInferResponse:
        requests.append(request)
        answer = echo(request)
        change(answer)
        return answer

    def stream(requests: Requests, context: Any) -> Iterator[Any]:
        for request in requests:
            yield pb.ModelStreamInferResponse(infer_response=infer(request))

    server.servicer.infer = infer
    server.servicer.stream = stream
    return requests


@pytest.fixture(autouse=True)
def batched(server: ScriptedServer) -> None:
    """A model whose metadata says that its rows are independent."""
    metadata = model("m", {"x": "FP32 -1 2"}, {"x": "FP32 -1 2"})
    metadata.properties["max_request_rows"] = "100"
    metadata.properties["max_message_bytes"] = "100000"
    server.servicer.models["m"] = metadata


def infer(client: InferenceClient, method: str, request_id: str = "a", **options: Any) -> Any:
    """Run one request by this method, and return its result."""
    if method == "stream":
        return next(client.stream("m", [StreamRequest(X, request_id)], **options))
    return call(client, method, "m", X, request_id=request_id, **options)


def rows(count: int) -> Change:
    def change(answer: pb.ModelInferResponse) -> None:
        answer.outputs[0].shape[0] = count
        answer.raw_output_contents[0] = bytes(count * 8)

    return change


def no_outputs(answer: pb.ModelInferResponse) -> None:
    del answer.outputs[:], answer.raw_output_contents[:]


def twice(answer: pb.ModelInferResponse) -> None:
    answer.outputs.append(answer.outputs[0])
    answer.raw_output_contents.append(answer.raw_output_contents[0])


def extra_content(answer: pb.ModelInferResponse) -> None:
    answer.raw_output_contents.append(b"")


def short_content(answer: pb.ModelInferResponse) -> None:
    answer.raw_output_contents[0] = b"1"


def set_output(field: str, value: str) -> Change:
    return lambda answer: setattr(answer.outputs[0], field, value)


def set_answer(field: str, value: str) -> Change:
    return lambda answer: setattr(answer, field, value)


WRONG: list[tuple[Change, dict[str, Any], str]] = [
    (rows(2), {}, "has shape [2, 2] for output 'x', expected the 3 rows of the request"),
    (rows(4), {}, "has shape [4, 2] for output 'x', expected the 3 rows of the request"),
    (no_outputs, {}, "has no outputs, expected at least one"),
    (no_outputs, {"outputs": ["x"]}, "has the outputs none, expected the requested outputs 'x'"),
    (set_output("name", "y"), {"outputs": ["x"]}, "has the outputs 'y', expected the requested outputs 'x'"),
    (set_output("name", "y"), {}, "has the output 'y', expected outputs out of 'x', as its metadata says"),
    (set_output("datatype", "INT32"), {}, "has INT32 for output 'x', expected FP32, as its metadata says"),
    (twice, {}, "output 'x' of the answer cannot be decoded: it occurs more than once"),
    (extra_content, {}, "the answer has 1 outputs and 2 raw contents"),
    (short_content, {}, "output 'x' of the answer cannot be decoded: "),
    (set_output("datatype", "FP128"), {}, "output 'x' of the answer cannot be decoded: "),
    (set_answer("model_name", "other"), {}, "has the model name 'other', expected the request's model name 'm'"),
    (set_answer("model_version", "3"), {"version": "2"}, "has the version '3', expected the request's version '2'"),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_answer_is_an_error_that_names_both(
    server: ScriptedServer, client: InferenceClient, method: str
) -> None:
    for change, options, text in WRONG:
        answering(server, change)
        with pytest.raises(Internal, match=re.escape(text)) as raised:
            infer(client, method, **options)
        assert raised.value.request_id == "a"
    answering(server, lambda answer: None)
    assert infer(client, method)["x"].tolist() == X["x"].tolist()


def test_float64_is_not_taken_for_bfloat16(server: ScriptedServer, client: InferenceClient) -> None:
    """For numpy, None is the dtype float64."""
    server.servicer.models["m"] = model("m", {"x": "FP64 -1"}, {"x": "BF16 -1"})
    with pytest.raises(Internal, match="has FP64 for output 'x', expected BF16"):
        client.infer("m", {"x": [1.0]})


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_with_another_id_is_an_error(
    server: ScriptedServer, client: InferenceClient, method: str
) -> None:
    answering(server, set_answer("id", "b"))
    # Of a stream, the answer could be that of any request.
    text = (
        "answered request id 'b'" if method == "stream" else "has the id 'b', expected the request's id 'a'"
    )
    with pytest.raises(InferenceError, match=text):
        infer(client, method)


def test_the_error_ends_one_request_of_a_stream(server: ScriptedServer, client: InferenceClient) -> None:
    def change(answer: pb.ModelInferResponse) -> None:
        if answer.id == "b":
            answer.model_name = "other"

    answering(server, change)
    requests = [StreamRequest(X, name) for name in ("a", "b", "c")]
    first, failed, last = client.stream("m", requests, on_error="yield", ordered=True)
    assert isinstance(failed, Internal)
    assert failed.request_id == "b"
    assert [result.id for result in (first, last) if isinstance(result, InferenceResult)] == ["a", "c"]


def test_an_answer_is_compared_with_its_request_although_the_next_has_its_id(
    server: ScriptedServer, client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_is_sent, take = threading.Event(), _RequestFeed.take

    def change(answer: pb.ModelInferResponse) -> None:
        if answer.outputs[0].shape[0] == 2:
            next_is_sent.set()

    def take_and_wait(feed: _RequestFeed) -> Any:
        taken = take(feed)
        if taken is not None:
            assert next_is_sent.wait(30)
        return taken

    answering(server, change)
    monkeypatch.setattr(_RequestFeed, "take", take_and_wait)
    requests = [StreamRequest({"x": X["x"][:count]}, "same") for count in (1, 2)]
    results = client.stream("m", requests, max_in_flight=1)
    assert [len(result["x"]) for result in results] == [1, 2]


def test_each_part_of_a_split_request_is_compared(server: ScriptedServer, client: InferenceClient) -> None:
    server.servicer.models["m"].properties["max_request_rows"] = "2"

    def change(answer: pb.ModelInferResponse) -> None:
        if answer.outputs[0].shape[0] == 2:
            rows(1)(answer)

    answering(server, change)
    text = re.escape("has shape [1, 2] for output 'x', expected the 2 rows of the request")
    with pytest.raises(Internal, match=text):
        client.infer("m", X)


def test_an_answer_in_shared_memory_is_compared(server: ScriptedServer, client: InferenceClient) -> None:
    server.servicer.shares_memory = True

    def answer_shared(change: Change, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        answer = pb.ModelInferResponse(model_name="m", id=request.id)
        answer.outputs.add(name="x", datatype="FP32", shape=[request.inputs[0].shape[0], 2])
        answer.raw_output_contents.append(b"")
        change(answer)
        return answer

    def second_axis(length: int) -> Change:
        return lambda answer: answer.outputs[0].shape.__setitem__(1, length)

    cases: list[tuple[Change, str]] = [
        (set_answer("model_name", "other"), "has the model name 'other'"),
        (set_answer("id", "b"), "has the id 'b'"),
        (no_outputs, "has the outputs none, expected the requested outputs 'x'"),
        (lambda answer: answer.outputs[0].shape.__setitem__(0, 1), "expected the 2 rows of the request"),
    ]
    others = (set_output("name", "y"), set_output("datatype", "INT32"), set_output("datatype", "BYTES"))
    for change in (
        lambda answer: answer.outputs.append(answer.outputs[0]),
        *others,
        second_axis(4),
        second_axis(-1),
    ):
        cases.append((change, "is not what was requested in shared memory"))
    with client.shared_memory("m", 3) as memory:
        for change, text in cases:
            server.servicer.infer = partial(answer_shared, change)
            with pytest.raises(Internal, match=re.escape(text)):
                memory.infer(rows=2, request_id="a")
        server.servicer.infer = partial(answer_shared, lambda answer: None)
        assert memory.infer(rows=2)["x"].shape == (2, 2)


@pytest.mark.parametrize("method", METHODS)
def test_a_model_may_be_replaced_by_one_with_other_outputs(
    server: ScriptedServer, client: InferenceClient, method: str
) -> None:
    """The metadata is fetched again before an answer is refused."""
    infer(client, method)
    replaced = model("m", {"x": "FP32 -1 2"}, {"y": "INT32 -1 2"})
    server.servicer.models["m"] = replaced

    def change(answer: pb.ModelInferResponse) -> None:
        rows(7)(answer)
        answer.outputs[0].name, answer.outputs[0].datatype = "y", "INT32"

    answering(server, change)
    fetched = server.servicer.calls.count("ModelMetadata")
    for _ in range(2):
        assert infer(client, method)["y"].shape == (7, 2)
    assert server.servicer.calls.count("ModelMetadata") == fetched + 1


def test_what_a_server_does_not_say_is_not_compared(server: ScriptedServer, client: InferenceClient) -> None:
    """KServe's server answers without a version, and chooses ids; Seldon Core adds the version to the name."""

    def nameless(answer: pb.ModelInferResponse) -> None:
        answer.id = answer.model_name = answer.model_version = ""

    def seldon(answer: pb.ModelInferResponse) -> None:
        answer.model_name, answer.model_version = "m_2", "2"

    def no_final(answer: pb.ModelInferResponse) -> None:
        no_outputs(answer)
        answer.parameters["triton_final_response"].bool_param = True

    cases: list[tuple[Change, dict[str, Any]]] = [
        (nameless, {"request_id": "a", "version": "1"}),
        (set_answer("id", "chosen"), {}),
        (seldon, {"request_id": "a", "version": "2"}),
        (set_answer("model_version", "2"), {"version": "02"}),
        (no_final, {"parameters": {"triton_enable_empty_final_response": True}}),
    ]
    for change, options in cases:
        answering(server, change)
        client.infer("m", X, **options)


def test_rows_are_compared_only_where_the_server_says_that_axis_0_has_them(
    server: ScriptedServer, client: InferenceClient
) -> None:
    """A detector answers with another number of boxes than of images."""
    server.servicer.models["m"] = model("m", {"x": "FP32 -1 2"}, {"x": "FP32 -1 2"})
    answering(server, rows(7))
    assert client.infer("m", X)["x"].shape == (7, 2)


def test_without_check_nothing_is_compared_with_the_metadata(server: ScriptedServer) -> None:
    answering(server, set_output("datatype", "INT32"))
    with InferenceClient(server.target, check=False) as client:
        assert client.infer("m", X)["x"].dtype == np.int32
        answering(server, set_answer("model_name", "other"))
        with pytest.raises(Internal, match="model name 'other'"):
            client.infer("m", X)
    assert "ModelMetadata" not in server.servicer.calls


# Classification


IMAGES = {"image": np.zeros((2, 8, 8), np.uint8)}


def with_classes(server: ScriptedServer, rows: Any) -> list[pb.ModelInferRequest]:
    """Let the server answer with these strings; return the list of its requests."""
    array = np.array(rows, object)

    def change(answer: pb.ModelInferResponse) -> None:
        no_outputs(answer)
        answer.outputs.add(name="image", datatype="BYTES", shape=array.shape)
        answer.raw_output_contents.append(tensors.encode_raw(array))

    return answering(server, change)


@pytest.mark.parametrize("method", METHODS)
def test_classes_of_each_row(server: ScriptedServer, client: InferenceClient, method: str) -> None:
    rows = [[b"0.75:3:three", b"0.25:1:one:or:so"], [b"12:0", b"-1.5e+03:9:"]]
    requests = with_classes(server, rows)
    outputs = {"image": Classification(2)}
    if method == "stream":
        [result] = client.stream("digits", [StreamRequest(IMAGES, outputs=outputs)])
    else:
        result = call(client, method, "digits", IMAGES, outputs=outputs)
    assert requests[0].outputs[0].parameters["classification"].int64_param == 2
    assert result.classes("image") == [
        [ClassScore(0.75, 3, "three"), ClassScore(0.25, 1, "one:or:so")],
        [ClassScore(12.0, 0, ""), ClassScore(-1500.0, 9, "")],
    ]


def test_a_model_without_batch_axis_has_one_row(server: ScriptedServer, client: InferenceClient) -> None:
    with_classes(server, [b"nan:4:\xff"])
    [[only]] = client.infer("digits", IMAGES, outputs={"image": Classification(1)}).classes("image")
    assert np.isnan(only.score)
    assert (only.index, only.label) == (4, "\udcff")


def test_other_outputs_are_no_classes(server: ScriptedServer, client: InferenceClient) -> None:
    result = client.infer("digits", IMAGES, outputs={"image": None})
    assert not server.servicer.requests[0].outputs[0].parameters
    with pytest.raises(InvalidInput, match=r"output 'image' expects classes.*got uint8 \[2, 8, 8\]"):
        result.classes("image")
    server.servicer.models["digits"].outputs[0].datatype = "BYTES"
    for row in (b"0.5", b"x:1", b"1:x", b""):
        with_classes(server, [row])
        result = client.infer("digits", IMAGES)
        with pytest.raises(InvalidInput, match=re.escape(f"got the element {row!r}: ask for them with")):
            result.classes("image")


def test_wrong_counts_of_classes_are_refused(client: InferenceClient) -> None:
    wrong: Any
    for wrong in (0, True, "3", 1.5, 2**63):
        with pytest.raises(InvalidInput, match="Classification expects an int from 1"):
            Classification(wrong)
    wrong = {"image": 3}
    with pytest.raises(InvalidInput, match="output 'image' expects a Classification, or None"):
        client.infer("digits", IMAGES, outputs=wrong)
