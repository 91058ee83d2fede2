"""Servers that say less than Triton's and tensorferry's, or say it otherwise, as MLServer's and KServe's do.

tests/wire/test_foreign_servers.py has the servers themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from client.calls import Output, refusal
from client.scripted import Context, ScriptedServer, echo, model

from tensorferry.client import InvalidInput
from tensorferry.client.cli import bench, commands, infer
from tensorferry.client.messages.checks import check_inputs, check_outputs
from tensorferry.client.messages.frames import Frame
from tensorferry.client.messages.metadata import ModelMetadata, ModelStatus
from tensorferry.protos import inference_pb2 as pb

X = np.array([[1, 2.5]], np.float32)
NAMELESS = ModelMetadata("nameless", (), "", (), ())


@pytest.fixture
def nameless(server: ScriptedServer) -> ScriptedServer:
    """The server with the model `nameless`, whose metadata names neither inputs nor outputs."""
    server.servicer.models["nameless"] = pb.ModelMetadataResponse(name="nameless")

    def answer(request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        if not request.inputs:
            context.abort(grpc.StatusCode.INTERNAL, "list index out of range")
        return echo(request)

    server.servicer.infer = answer
    return server


@pytest.fixture
def row(tmp_path: Path) -> str:
    """The name of a file with a row."""
    np.save(tmp_path / "row.npy", X)
    return str(tmp_path / "row.npy")


def test_columns_need_names_of_inputs() -> None:
    with pytest.raises(InvalidInput, match="expects a dict of arrays, because its metadata names no inputs"):
        check_inputs(Frame([("a", np.ones(1)), ("b", np.ones(1))]), NAMELESS)
    check_outputs(["any"], NAMELESS)


def test_properties_may_be_messages() -> None:
    """MLServer has InferParameter messages where the protocol has strings."""
    message = model("m", {}, {})
    values: dict[str, dict[str, Any]] = {
        "content_type": {"string_param": "np"},
        "rows": {"int64_param": 7},
        "raw": {"bool_param": True},
    }
    for name, value in values.items():
        message.properties[name] = pb.InferParameter(**value).SerializeToString().decode()
    message.properties["text"] = "\x1anot a message"
    assert ModelMetadata.from_message(message).properties == {
        "owner": "vision",
        "content_type": "np",
        "rows": "7",
        "raw": "True",
        "text": "\x1anot a message",
    }


def test_states_may_be_names_of_an_enum() -> None:
    index = pb.RepositoryIndexResponse()
    index.models.add(name="m", state="State.UNAVAILABLE", reason="why")
    assert ModelStatus.from_message(index) == (ModelStatus("m", "", "UNAVAILABLE", "why"),)


def test_describe_without_names_of_inputs(nameless: ScriptedServer, capsys: Output) -> None:
    assert commands.describe(["nameless", "--target", nameless.target]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "nameless: unknown platform, no named versions",
        "",
        "The server names no inputs. If the model has some, send them as arrays:",
        "",
        f"tensorferry infer nameless --target {nameless.target} --input NAME=FILE.npy",
    ]


def test_models_without_an_index(server: ScriptedServer, capsys: Output) -> None:
    server.servicer.failures = [grpc.StatusCode.UNIMPLEMENTED]
    assert commands.models(["--target", server.target]) == 1
    expected = (
        "the server does not list its models (RepositoryIndex): name one, as in tensorferry describe MODEL"
    )
    assert capsys.readouterr().err == f"tensorferry models: {server.target}: UNIMPLEMENTED: {expected}\n"


def test_infer_takes_inputs_with_a_datatype(
    nameless: ScriptedServer, tmp_path: Path, row: str, capsys: Output
) -> None:
    np.savez(tmp_path / "all.npz", x=X)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}
    for arguments in (
        ["--input", f"x={row}"],
        ["--input", str(tmp_path / "all.npz")],
        ["--json", json.dumps({"inputs": [tensor]})],
    ):
        assert infer.main(["nameless", "--target", nameless.target, "--format", "json", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["outputs"] == [tensor]


_JSON = (
    '--json expects {"inputs": [{"name", "shape", "datatype", "data"}]}, because the server names no inputs'
)


WRONG: list[tuple[list[str], str]] = [
    (["--input", "x=[1]"], "--input expects NAME=FILE.npy or FILE.npz, because the server names no inputs of"),
    (["--input", "x=/no/such.npy"], "input 'x' of model 'nameless' expects a file that can be read"),
    (["--input", "/no/such.npz"], "--input expects a file that numpy.savez wrote"),
    (["--json", "[1]"], _JSON),
    (
        ["--json", '{"inputs": [{"name": "x", "shape": [1], "data": [1]}]}'],
        '--json: input \'x\' expects {"name", "shape", "datatype", "data"}, because the server names no inputs',
    ),
    (
        ["--json", '{"inputs": [{"name": "x", "shape": [1], "datatype": "FP8", "data": [1]}]}'],
        "input 'x' of model 'nameless' expects FP8 [-1], got a datatype that cannot be converted",
    ),
    (["--random"], "--random expects a model whose inputs the server names, got model 'nameless'"),
]  # fmt: skip


def test_infer_guesses_no_datatype(nameless: ScriptedServer, capsys: Output) -> None:
    for arguments, text in WRONG:
        assert text in refusal(capsys, infer.main, ["nameless", "--target", nameless.target, *arguments])


def test_a_refused_request_without_inputs_says_why_it_had_none(
    nameless: ScriptedServer, capsys: Output
) -> None:
    for command, arguments, name in (
        (infer.main, ["nameless", "--target", nameless.target], "infer"),
        (bench.main, [nameless.target, "nameless"], "bench"),
    ):
        assert command(arguments) == 1
        assert capsys.readouterr().err == (
            f"tensorferry {name}: {nameless.target}: INTERNAL: list index out of range (the request had no inputs,"
            " because the server names none of model 'nameless': give --input NAME=FILE.npy)\n"
        )
