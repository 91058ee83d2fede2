"""Requests above the limits of the server: split, and their results joined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from client.scripted import ScriptedServer, model

from tensorferry.client import DeadlineExceeded, InferenceClient, InvalidInput, NotFound
from tensorferry.client.connection import context
from tensorferry.protos import inference_pb2 as pb

LIMITS = {"max_request_rows": "10", "max_message_bytes": "1000"}
Sent = list[pb.ModelInferRequest]


def limited(server: ScriptedServer, inputs: dict[str, str], **properties: str) -> Sent:
    """Let the server state limits for a model `m`; return the list of its requests."""
    server.servicer.models["m"] = model("m", inputs, inputs)
    server.servicer.models["m"].properties.update(properties or LIMITS)
    return server.servicer.requests


def rows_of(sent: Sent) -> list[int]:
    return [request.inputs[0].shape[0] for request in sent]


@pytest.mark.parametrize(("rows", "parts"), [(10, [10]), (11, [5, 6]), (35, [8, 9, 9, 9])])
def test_rows_are_split_evenly_and_joined_in_order(
    server: ScriptedServer, client: InferenceClient, rows: int, parts: list[int]
) -> None:
    sent = limited(server, {"x": "INT32 -1 2", "y": "FP32 -1"})
    x, y = np.arange(2 * rows, dtype=np.int32).reshape(rows, 2), np.arange(rows, dtype=np.float32)
    result = client.infer("m", {"x": x, "y": y}, request_id="a", parameters={"priority": 1})
    np.testing.assert_array_equal(result["x"], x)
    np.testing.assert_array_equal(result["y"], y)
    assert (result.id, result.parameters) == ("a", {"priority": 1})
    assert rows_of(sent) == parts
    assert all(request.id == "a" and request.parameters["priority"].int64_param == 1 for request in sent)


def test_lists_and_columns_are_split(server: ScriptedServer, client: InferenceClient) -> None:
    sent = limited(server, {"x": "INT32 -1 2"})
    expected = np.stack([np.arange(12), np.arange(12)], axis=1)
    for inputs in ({"x": expected.tolist()}, {"a": list(range(12)), "b": list(range(12))}):
        result = client.infer("m", inputs)
        np.testing.assert_array_equal(result["x"], expected)
    assert rows_of(sent) == [6, 6, 6, 6]


def test_bytes_are_bounded(server: ScriptedServer, client: InferenceClient) -> None:
    sent = limited(server, {"x": "FP32 -1 100"})
    x = np.arange(500, dtype=np.float32).reshape(5, 100)
    np.testing.assert_array_equal(client.infer("m", {"x": x})["x"], x)
    assert sum(rows_of(sent)) == 5
    assert len(sent) > 1
    assert all(request.ByteSize() <= 1000 for request in sent)


def test_strings_of_different_lengths_are_split_until_they_fit(
    server: ScriptedServer, client: InferenceClient
) -> None:
    sent = limited(server, {"x": "BYTES -1"})
    x = np.array([b"a"] * 5 + [b"b" * 400] * 4, object)
    assert client.infer("m", {"x": x})["x"].tolist() == x.tolist()
    assert all(request.ByteSize() <= 1000 for request in sent)
    assert rows_of(sent)[0] > 1


def test_a_large_answer_is_split(server: ScriptedServer, client: InferenceClient) -> None:
    """The outputs of known size decide, too."""
    sent = limited(server, {"x": "UINT8 -1"}, max_request_rows="1000", max_message_bytes="8192")
    server.servicer.models["m"].outputs[0].shape[:] = [-1, 100]
    server.servicer.models["m"].outputs[0].datatype = "FP64"
    infer = server.servicer.infer

    def wide(request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        answer = infer(request, context)
        (rows,) = answer.outputs[0].shape
        answer.outputs[0].datatype = "FP64"
        answer.outputs[0].shape[:] = [rows, 100]
        answer.raw_output_contents[0] = bytes(rows * 100 * 8)
        return answer

    server.servicer.infer = wide
    client.infer("m", {"x": np.zeros(10, np.uint8)})
    assert rows_of(sent) == [5, 5]


def test_inputs_without_rows_are_sent_with_each_part(server: ScriptedServer, client: InferenceClient) -> None:
    sent = limited(server, {"x": "INT32 -1", "scale": "FP32 1"})
    server.servicer.models["m"].outputs.pop()
    inputs = {"x": np.arange(20, dtype=np.int32), "scale": np.array([2], np.float32)}
    result = client.infer("m", inputs, outputs=["x"])
    assert result["x"].tolist() == list(range(20))
    assert [[list(tensor.shape) for tensor in request.inputs] for request in sent] == [
        [[10], [1]],
        [[10], [1]],
    ]


@pytest.mark.parametrize("rows", [None, "0", "-1", "x", "1" * 19])
def test_without_limits_a_request_is_sent_whole(
    server: ScriptedServer, client: InferenceClient, rows: str | None
) -> None:
    properties = {"max_request_rows": "10"} if rows is None else {**LIMITS, "max_request_rows": rows}
    sent = limited(server, {"x": "INT32 -1"}, **properties)
    client.infer("m", {"x": np.arange(2000, dtype=np.int32)})
    assert rows_of(sent) == [2000]


def test_what_cannot_be_split_is_sent_whole(server: ScriptedServer, client: InferenceClient) -> None:
    sent = limited(server, {"x": "INT32 -1", "y": "INT32 -1"})
    client.infer("m", {"x": np.zeros(20, np.int32), "y": np.zeros(19, np.int32)})
    same = {"x": np.zeros(20, np.int32), "y": np.zeros(20, np.int32)}
    client.infer("m", same, parameters={"sequence_id": 1})
    assert rows_of(sent) == [20, 20]


def test_the_clients_own_limit_counts_and_without_check_nothing_is_split(server: ScriptedServer) -> None:
    sent = limited(server, {"x": "UINT8 -1"}, max_request_rows="1000000", max_message_bytes="1000000")
    with InferenceClient(server.target, max_message_bytes=3000) as client:
        result = client.infer("m", {"x": np.zeros(5000, np.uint8)}, outputs=["x"])
    assert result["x"].shape == (5000,)
    assert len(sent) > 1
    sent = limited(server, {"x": "INT32 -1"})
    sent.clear()
    with InferenceClient(server.target, check=False) as client:
        client.infer("m", {"x": np.zeros(30, np.int32)})
    assert rows_of(sent) == [30]


def test_the_first_error_ends_the_request(server: ScriptedServer, client: InferenceClient) -> None:
    sent = limited(server, {"x": "INT32 -1"})
    infer = server.servicer.infer

    def fail(request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        if len(sent) == 1:
            context.abort(grpc.StatusCode.NOT_FOUND, "gone")
        return infer(request, context)

    server.servicer.infer = fail
    with pytest.raises(NotFound, match="gone"):
        client.infer("m", {"x": np.zeros(30, np.int32)})
    assert len(sent) == 1


def test_all_parts_have_one_deadline(
    server: ScriptedServer, client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part takes 400 s, so the timeout passes before the fourth."""
    sent = limited(server, {"x": "INT32 -1"})
    infer, left = server.servicer.infer, []

    def slow(request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        left.append(round(context.time_remaining(), -2))
        return infer(request, context)

    monkeypatch.setattr(context, "time", SimpleNamespace(monotonic=lambda: 400.0 * len(sent)))
    server.servicer.infer = slow
    with pytest.raises(DeadlineExceeded):
        client.infer("m", {"x": np.zeros(40, np.int32)}, timeout=1000.0)
    assert left == [1000, 600, 200]


def test_answers_of_different_shapes_are_not_joined(server: ScriptedServer, client: InferenceClient) -> None:
    sent = limited(server, {"x": "INT32 -1 -1"})
    infer = server.servicer.infer

    def wider(request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        answer = infer(request, context)
        if len(sent) == 2:
            answer.outputs[0].shape[:] = [10, 2]
            answer.raw_output_contents[0] *= 2
        return answer

    server.servicer.infer = wider
    message = r"in 2 parts expects answers that can be joined along the rows of output 'x', got \[10, 1\], \[10, 2\]"
    with pytest.raises(InvalidInput, match=message):
        client.infer("m", {"x": np.zeros((20, 1), np.int32)})
