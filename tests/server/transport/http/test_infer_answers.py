"""Answers to inferences: JSON and binary outputs."""

from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np
import pytest

from tensorferry.batcher import Outcome
from tensorferry.protos.tensors import DATATYPES, datatype_of
from tensorferry.server.inference.requests.codec import RequestedOutput, ResponseSpec
from tensorferry.server.inference.responses.responses import ResponseTemplate, id_field_of
from tensorferry.server.signature import TensorSpec
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.infer_answers import AnswerTranslator
from tensorferry.server.transport.http.infer_requests import AnswerForm

BINARY = AnswerForm(all_binary=True)


def parsed(data: bytes) -> tuple[dict[str, str], Any, bytes]:
    """The headers, the JSON and the binary part of a response."""
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert int(headers["Content-Length"]) == len(body)
    if headers.get("Content-Encoding") == "gzip":
        body = gzip.decompress(body)
    length = int(headers.get("Inference-Header-Content-Length", len(body)))
    return headers, json.loads(body[:length]), body[length:]


class Model:
    """A model with these outputs, whose answers are made as the service makes them."""

    def __init__(self, **outputs: np.ndarray[Any, Any]) -> None:
        specs = [
            TensorSpec(name, DATATYPES["BYTES" if array.dtype == object else datatype_of(array)], array.shape)
            for name, array in outputs.items()
        ]
        self._outcome = Outcome(outputs=outputs)
        self._template = ResponseTemplate(
            "m", "1", ResponseSpec(tuple(map(RequestedOutput, specs)), typed=False, explain=False)
        )
        self.translator = AnswerTranslator()

    def answer(
        self, form: AnswerForm, request_id: str = "", **options: Any
    ) -> tuple[dict[str, str], Any, bytes]:
        pieces = self._template.pieces(id_field_of(request_id), self._outcome)
        return parsed(self.translator.response(pieces, form, **options))


def test_values_beyond_a_million_are_only_binary() -> None:
    model = Model(x=np.zeros((1 << 20) + 1, np.uint8))
    assert len(model.answer(BINARY)[2]) == (1 << 20) + 1
    with pytest.raises(HttpError, match="binary_data"):
        model.answer(AnswerForm())


@pytest.mark.parametrize("request_id", ["", "r1", 'a "quoted" \\ ü', "x" * 200])
def test_outputs_are_binary_or_json_as_asked(request_id: str) -> None:
    x, y = np.array([[1, 2.5]], np.float32), np.array([7, -1])
    model = Model(x=x, y=y)
    for _ in range(2):
        headers, answer, tail = model.answer(AnswerForm(binary=frozenset("x")), request_id)
        assert headers["Content-Type"] == "application/octet-stream"
        assert answer == {
            **({"id": request_id} if request_id else {}),
            "model_name": "m",
            "model_version": "1",
            "outputs": [
                {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
                {"name": "y", "datatype": "INT64", "shape": [2], "data": [7, -1]},
            ],
        }
        assert tail == x.tobytes()
        assert model.answer(BINARY, request_id)[2] == x.tobytes() + y.tobytes()
        headers, answer, tail = model.answer(AnswerForm(), request_id)
        assert (headers["Content-Type"], tail) == ("application/json", b"")
        assert [output["data"] for output in answer["outputs"]] == [[1, 2.5], [7, -1]]


def test_a_string_that_is_not_utf8_can_only_be_binary() -> None:
    model = Model(s=np.array([b"\xff"], object))
    with pytest.raises(HttpError, match="use binary_data=True") as error:
        model.answer(AnswerForm())
    assert error.value.status == 500
    assert model.answer(BINARY)[2] == b"\1\0\0\0\xff"


def test_without_a_byte_the_answer_is_json_alone() -> None:
    headers, answer, _ = Model(x=np.zeros((0, 3), np.float32)).answer(BINARY)
    assert headers["Content-Type"] == "application/json"
    assert "Inference-Header-Content-Length" not in headers
    assert answer["outputs"][0]["parameters"] == {"binary_data_size": 0}


def test_only_long_json_is_compressed() -> None:
    long = Model(x=np.zeros(3000, np.float32))
    assert long.answer(AnswerForm(), gzipped=True)[0]["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in long.answer(BINARY, gzipped=True)[0]
    assert "Content-Encoding" not in Model(x=np.zeros(3, np.float32)).answer(AnswerForm(), gzipped=True)[0]
