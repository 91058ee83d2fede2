"""The bounds of a load request: the paths of its files, and the size of its configuration."""

from __future__ import annotations

import logging

import grpc
import pytest
from support.server.rig import Make
from support.server.tokens import METHODS, outcome

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.wire import bounds

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def load(make: Make, **parameters: pb.ModelRepositoryParameter) -> tuple[grpc.StatusCode, str]:
    """The status of a load with these parameters."""
    app = make(model_control="explicit")
    request = pb.RepositoryModelLoadRequest(model_name="sent", parameters=parameters)
    with grpc.insecure_channel(app.address) as channel:
        return outcome(channel, METHODS["RepositoryModelLoad"], data=request.SerializeToString())


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("1" + "/d" * 400 + "/model.onnx", "has 402 parts, the longest of 10 characters; this server takes at most 16 parts"),
        (f"1/{'d' * 300}/model.onnx", "has 3 parts, the longest of 300 characters"),
    ],
    ids=["parts", "long"],
)  # fmt: skip
def test_a_path_with_too_many_or_too_long_parts_is_refused(
    start: Make, path: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        code, message = load(
            start,
            config=pb.ModelRepositoryParameter(string_param="{}"),
            **{f"file:{path}": pb.ModelRepositoryParameter(bytes_param=b"no model")},
        )
    assert (code, text in message) == (INVALID, True), message
    assert not caplog.records


def test_a_configuration_with_too_many_entries_is_refused(start: Make) -> None:
    text = '{"input": [' + "{}," * bounds.MAX_FIELDS + "{}]}"
    code, message = load(start, config=pb.ModelRepositoryParameter(string_param=text))
    assert code is INVALID
    assert f"entries; this server takes at most {bounds.MAX_FIELDS}" in message
