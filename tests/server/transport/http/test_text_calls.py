"""Bodies of text endpoints: whatever they are, they become texts for a model, or an error of the client."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.routes import target_of
from tensorferry.server.transport.http.text import openai, rerank, tei
from tensorferry.server.transport.http.text.requests import TextForm, TextRequests
from tensorferry.server.transport.http.text.text_call import (
    TextEndpoint,
    TextResult,
    check_values,
    vectors_as_json,
)

ENDPOINTS: dict[str, tuple[TextEndpoint, dict[str, Any]]] = {
    "embeddings": (openai.embeddings, {"input": ["a", "b"], "encoding_format": "float", "dimensions": 2}),
    "embed": (tei.embed, {"inputs": ["a", "b"], "dimensions": 1, "truncation_direction": "right"}),
    "embed_all": (tei.embed_all, {"inputs": ["a", "b"], "truncation_direction": "right"}),
    "predict": (tei.predict, {"inputs": [["a", "b"], ["c", "d"]], "raw_scores": True}),
    "rerank": (rerank.rerank, {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}),
    "texts": (rerank.rerank, {"query": "q", "texts": ["a", "b"], "return_text": True}),
    "score": (rerank.score, {"text_1": "a", "text_2": ["b", "c"]}),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3000) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("name", ENDPOINTS)
@given(data=st.data())
def test_any_json_is_texts_or_an_error(name: str, data: st.DataObject) -> None:
    endpoint, body = ENDPOINTS[name]
    changes = data.draw(st.dictionaries(st.sampled_from([*body, "model", "prompt_name"]), JSON))
    check(endpoint, {**body, **changes})


def check(endpoint: TextEndpoint, fields: dict[str, Any]) -> None:
    try:
        call = endpoint(fields)
    except HttpError as error:
        if error.status != 400:
            raise
        return
    count = len(call.columns[0])
    assert 0 < count <= 2048
    assert all(len(column) == count and set(map(type, column)) == {str} for column in call.columns)
    values = np.linspace(0, 1, 4 * count, dtype=np.float32).reshape(count, 4)
    of_task = {"rerank": values[:, 0], "token_embedding": values.reshape(count, 2, 2)}.get(call.task, values)
    try:
        call.answer(TextResult("m", of_task, [1] * count, "abcd", False))
    except HttpError as error:
        # More dimensions than the model has are one of the client.
        if error.status != 400:
            raise


def model_of(task: str) -> pb.ModelMetadataResponse:
    model = pb.ModelMetadataResponse(name=task, properties={"task": task})
    for name in ("query", "text") if task == "rerank" else ("text",):
        model.inputs.add(name=name, datatype="BYTES", shape=[-1])
    for name in ("vector", "score", "scores"):
        model.outputs.add(name=name, datatype="FP32", shape=[-1, 2])
    return model


@pytest.mark.parametrize(
    ("path", "body", "tasks", "chosen"),
    [
        ("/", {"inputs": "a"}, ["embedding"], "embedding"),
        ("/", {"inputs": "a"}, ["classify"], "classify"),
        ("/", {"query": "a", "texts": ["b"]}, ["rerank"], "rerank"),
        ("/", {"inputs": "a"}, ["embedding", "rerank", "classify"], "embedding"),
        ("/", {"inputs": "a", "model": "classify"}, ["embedding", "classify"], "classify"),
        ("/models/classify", {"inputs": "a"}, ["embedding", "classify"], "classify"),
        ("/models/rerank", {"query": "a", "texts": ["b"]}, ["embedding", "rerank"], "rerank"),
        ("/models/embedding/", {"inputs": "a"}, ["embedding", "rerank"], "embedding"),
    ],
)
def test_a_path_without_a_task_has_that_of_its_model(
    path: str, body: dict[str, Any], tasks: list[str], chosen: str
) -> None:
    models = {task: model_of(task) for task in tasks}
    requests = TextRequests(lambda: [*models.values()], lambda name, version: models[name])
    route, parts = target_of("POST", path)
    endpoints: Any = route.form
    data, form = requests.message(endpoints, json.dumps(body).encode(), parts["name"])
    assert (pb.ModelInferRequest.FromString(data).model_name, form.call.task) == (chosen, chosen)


def test_each_token_has_a_vector() -> None:
    answer = tei.embed_all({"inputs": ["a", "b"]}).answer
    with pytest.raises(HttpError, match="the model gave 3 vectors for a text of 4 tokens") as failed:
        answer(TextResult("m", np.zeros((2, 3, 1), np.float32), [1, 4], (), False))
    assert failed.value.status == 500


def test_padding_before_a_token_is_refused() -> None:
    message = pb.ModelInferResponse(model_name="m")
    for name, datatype, array in (
        ("vectors", "FP32", np.zeros((1, 3, 1), "<f4")),
        ("attention_mask", "INT64", np.array([[0, 1, 1]], "<i8")),
    ):
        message.outputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_output_contents.append(array.tobytes())
    form = TextForm(tei.embed_all({"inputs": "a"}), "", (), False)
    with pytest.raises(HttpError, match="padding before a token") as failed:
        form.response([message.SerializeToString()])
    assert failed.value.status == 500


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_text_gives_back_the_same_numbers(numbers: list[float]) -> None:
    (text,) = vectors_as_json(np.array([numbers], np.float32))
    back = np.array([float(each) for each in text[1:-1].split(",")], np.float32)
    assert back.tobytes() == np.array(numbers, np.float32).tobytes()


@pytest.mark.parametrize(
    ("values", "labels", "message"),
    [([[1, np.nan]], "", "a number that is not finite"), ([[1, 2]], "abc", "2 classes, but has 3 labels")],
)
def test_values_that_cannot_be_told_are_an_error_of_the_model(
    values: list[list[float]], labels: str, message: str
) -> None:
    with pytest.raises(HttpError, match=message) as failed:
        check_values(np.array(values, np.float32), labels)
    assert failed.value.status == 500
