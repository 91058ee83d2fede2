"""The shell commands against a running server."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from client.scripted import ScriptedServer, echo, model

from tensorferry.client.cli import commands
from tensorferry.client.cli.array_files import read_array, write_array
from tensorferry.client.connection.target import default_targets
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import Array


def saved(directory: Path, name: str, array: Array) -> str:
    path = directory / f"{name}.npy"
    np.save(path, array)
    return str(path)


def test_infer_prints_the_outputs(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = saved(tmp_path, "words", np.array(["a", "å"]))
    weights = saved(tmp_path, "weights", np.array([[1, 2.5]], np.float32))
    arguments = [
        "text",
        "--target",
        server.target,
        "--input",
        f"words={words}",
        "--input",
        f"weights={weights}",
        "--parameter=word=a\x1b[2J",
    ]
    assert commands.infer(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model text, version 2",
        "words  BYTES [2]",
        r"[b'a' b'\xc3\xa5']",
        "weights  FP32 [1, 2]",
        "[[1.  2.5]]",
        r"word = 'a\x1b[2J'",
    ]


def test_infer_sends_its_options(server: ScriptedServer, tmp_path: Path) -> None:
    received: list[pb.ModelInferRequest] = []

    def infer(request: pb.ModelInferRequest, context: object) -> pb.ModelInferResponse:
        received.append(request)
        return echo(request)

    server.servicer.infer = infer
    x = saved(tmp_path, "x", np.array([1]))
    options = ["--model-version", "7", "--request-id", "r1", "--output", "x", "--header", "X-Key=a=b"]
    parameters = [f"--parameter={pair}" for pair in ("b=true", "i=3", "f=0.5", "s=x=y")]
    assert commands.infer(["row", "--target", server.target, "--input", f"x={x}", *options, *parameters]) == 0
    (request,) = received
    assert (request.model_version, request.id, request.outputs[0].name) == ("7", "r1", "x")
    assert request.parameters["b"].bool_param is True
    assert request.parameters["i"].int64_param == 3
    assert request.parameters["f"].double_param == 0.5
    assert request.parameters["s"].string_param == "x=y"
    assert server.metadata_of("ModelInfer")["x-key"] == "a=b"


def test_infer_writes_files(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.servicer.models["m"] = model("m", {"a/b": "BF16 -1", "a:b": "BF16 -1"}, {})
    file = saved(tmp_path, "x", np.array([1.5, 2], ml_dtypes.bfloat16))
    out = tmp_path / "new" / "out"
    arguments = ["--input", f"a/b={file}", "--input", f"a:b={file}", "--output-dir", str(out)]
    assert commands.infer(["m", "--target", server.target, *arguments]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["a_b-2.npy", "a_b.npy"]
    array = np.load(out / "a_b.npy")
    assert array.dtype == np.float32
    assert array.tolist() == [1.5, 2]
    assert str(out / "a_b-2.npy") in capsys.readouterr().out


def test_bytes_are_written_without_loss(tmp_path: Path) -> None:
    plain = np.array([[b"a", b""], [b"\0b", b"long"]], object)
    path = write_array(tmp_path, "..plain", plain, set())
    assert path.name == "plain.npy"
    np.testing.assert_array_equal(read_array(path).astype(object), plain)
    path = write_array(tmp_path, "zeros", np.array([b"a\0", b"b"], object), set())
    assert path.name == "zeros.jsonl"
    header, *elements = map(json.loads, path.read_text().splitlines())
    assert header == {"datatype": "BYTES", "shape": [2]}
    assert [base64.b64decode(element) for element in elements] == [b"a\0", b"b"]


def test_models_lists_the_repository(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.models(["--target", server.target]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAME    VERSION  STATE        REASON",
        "digits  1        READY",
        "text    1        READY",
        "row     1        READY",
        "broken  3        UNAVAILABLE  no such file",
    ]


def test_describe_shows_inputs_and_outputs(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.describe(["digits", "--target", server.target]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "digits: onnxruntime_onnx, versions 1, 2",
        "        NAME   DATATYPE  SHAPE",
        "input   image  UINT8     [-1, 8, 8]",
        "output  image  UINT8     [-1, 8, 8]",
    ]


@pytest.mark.parametrize(
    ("command", "arguments", "text"),
    [
        (commands.describe, ["nothing"], "tensorferry describe: {target}: NOT_FOUND: no model 'nothing'\n"),
        (commands.infer, ["nothing"], "tensorferry infer: {target}: NOT_FOUND: no model 'nothing'\n"),
    ],
)
def test_a_server_error_is_one_line(
    server: ScriptedServer,
    capsys: pytest.CaptureFixture[str],
    command: Callable[[Sequence[str]], int],
    arguments: list[str],
    text: str,
) -> None:
    assert command([*arguments, "--target", server.target]) == 1
    assert capsys.readouterr().err == text.format(target=server.target)


def test_an_unreachable_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.models(["--target", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tensorferry models: 127.0.0.1:1: UNAVAILABLE: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--input", "x"], "argument --input: expected NAME=FILE.npy, got 'x'"),
        (["--input", "x=/no/such"], "argument --input: '/no/such' cannot be read as an array"),
        (["--input", f"x={__file__}"], "name a file that numpy.save wrote"),
        (["--parameter", "=1"], "argument --parameter: expected NAME=VALUE, got '=1'"),
        (["--header", "h"], "argument --header: expected NAME=VALUE, got 'h'"),
        (["--header", "a-bin"], "argument --header"),
        (["--timeout", "0"], "argument --timeout: expected a positive number of seconds, got '0'"),
        (["--timeout", "soon"], "got 'soon'"),
        (["--timeout", "-1"], "argument --timeout: expected a positive number of seconds, got '-1'"),
        (["--timeout", "nan"], "argument --timeout: expected a positive number of seconds, got 'nan'"),
        (
            ["--target", "127.0.0.1"],
            "argument --target: expected 'host:port', got '127.0.0.1': write '127.0.0.1:8001'",
        ),
        (
            ["--target", "http://a:1"],
            "argument --target: expected 'host:port', got 'http://a:1': write 'a:1'",
        ),
        (["--target", ""], "argument --target: expected 'host:port', got ''"),
        (["--ca-file", "/no/such"], "argument --ca-file: '/no/such' is not a file"),
        (["--cert-file", "c.pem"], "argument --cert-file: got 'c.pem' without --key-file"),
        (["--key-file", "k.pem"], "argument --key-file: got 'k.pem' without --cert-file"),
        (["--parameter", "a=1", "--parameter", "a=2"], "argument --parameter: 'a' is given more than once"),
        (["--nonsense"], "--nonsense"),
        ([], "model 'row' expects the inputs 'x', got none: add 'x'"),
    ],
)
def test_a_bad_argument_exits_with_2(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        commands.infer(["row", "--target", server.target, *arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.startswith("tensorferry infer: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [commands.infer, commands.models, commands.describe, commands.ready])
@pytest.mark.parametrize("argument", [["--target", "http://a:1"], ["--timeout", "0"]], ids=" ".join)
def test_each_command_checks_target_and_timeout(
    command: Callable[[Sequence[str]], int], argument: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["m"] if command in (commands.infer, commands.describe) else []
    with pytest.raises(SystemExit) as caught:
        command([*model, *argument])
    assert caught.value.code == 2
    assert f"argument {argument[0]}: expected" in capsys.readouterr().err


def test_an_infinite_timeout(server: ScriptedServer) -> None:
    assert commands.models(["--target", server.target, "--timeout", "inf"]) == 0


@pytest.mark.parametrize("command", [commands.infer, commands.models, commands.describe])
def test_help_is_available(
    command: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command(["--help"])
    assert caught.value.code == 0
    assert "--target" in capsys.readouterr().out


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path, "objects", np.array([object()], object))
    with pytest.raises(ValueError, match="allow_pickle"):
        read_array(Path(path))


def test_ready_returns_the_exit_status(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.ready(["--target", server.target, "--timeout", "30"]) == 0
    server.servicer.ready = False
    assert commands.ready(["--target", server.target, "--timeout", "30"]) == 1
    assert commands.ready(["--target", "127.0.0.1:1", "--timeout", "30"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"tensorferry ready: {server.target}: UNAVAILABLE: not reachable or not ready",
        "tensorferry ready: 127.0.0.1:1: UNAVAILABLE: not reachable or not ready",
    ]


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("infer", ["m", "--imput", "x=a.npy"], "unknown flag --imput; did you mean --input?"),
        ("describe", ["m", "--time=3"], "unknown flag --time; did you mean --timeout?"),
        ("models", ["--qqqq"], "unknown flag --qqqq"),
        ("ready", ["now"], "unexpected argument 'now'"),
        ("ready", ["--target"], "argument --target: expected one argument"),
    ],
)
def test_wrong_arguments_are_one_line_with_the_nearest_flag(
    command: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        getattr(commands, command)(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"tensorferry {command}: {said} (--help shows all options)\n"


@pytest.mark.parametrize("command", [commands.models, commands.ready])
def test_the_environment_names_the_target(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, command: Callable[[Sequence[str]], int]
) -> None:
    monkeypatch.setenv("TENSORFERRY_TARGET", server.target)
    assert command([]) == 0
    monkeypatch.setenv("TENSORFERRY_TARGET", "127.0.0.1:1")
    assert command(["--target", server.target]) == 0


def test_a_wrong_target_of_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORFERRY_TARGET", "http://a:1")
    with pytest.raises(SystemExit) as caught:
        commands.models([])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(
        "tensorferry models: the environment variable TENSORFERRY_TARGET expects 'host:port', got 'http://a:1': write 'a:1'"
    )


def test_without_a_variable_the_target_is_this_machine() -> None:
    assert default_targets({}) == default_targets({"TENSORFERRY_TARGET": ""}) == ("127.0.0.1:8001",)
