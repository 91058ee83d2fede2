"""The shell commands against a running server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
import pytest
from client.command_line import Output, refusal
from client.scripted import ScriptedServer, model

from tensorferry.client.cli import bench, commands, infer
from tensorferry.client.connection.target import default_targets


def test_models_lists_the_repository(server: ScriptedServer, capsys: Output) -> None:
    assert commands.models(["--target", server.target]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAME    VERSION  STATE        REASON",
        "digits  1        READY",
        "text    1        READY",
        "row     1        READY",
        "broken  3        UNAVAILABLE  no such file",
    ]


def test_describe_shows_inputs_and_outputs(server: ScriptedServer, capsys: Output) -> None:
    assert commands.describe(["digits", "--target", server.target]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "digits: onnxruntime_onnx, versions 1, 2",
        "        NAME   DATATYPE  SHAPE",
        "input   image  UINT8     [-1, 8, 8]",
        "output  image  UINT8     [-1, 8, 8]",
    ]
    assert lines[7] == f"tensorferry infer digits --target {server.target} --random"


@pytest.mark.parametrize("shape", ["-1", "-1 100"])
def test_describe_without_an_example(server: ScriptedServer, capsys: Output, shape: str) -> None:
    server.servicer.models["m"] = model("m", {"x": f"FP8 {shape}"}, {})
    assert commands.describe(["m", "--target", server.target]) == 0
    assert "no example: input 'x' of model 'm' expects FP8" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "name"), [(commands.describe, "describe"), (infer.main, "infer")])
def test_a_server_error_is_one_line(
    server: ScriptedServer, capsys: Output, command: Callable[[Sequence[str]], int], name: str
) -> None:
    assert command(["nothing", "--target", server.target]) == 1
    assert capsys.readouterr().err == f"tensorferry {name}: {server.target}: NOT_FOUND: no model 'nothing'\n"


def test_an_unreachable_server_is_one_line(capsys: Output) -> None:
    assert commands.models(["--target", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tensorferry models: 127.0.0.1:1: UNAVAILABLE: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [infer.main, commands.models, commands.describe, commands.ready])
@pytest.mark.parametrize("argument", [["--target", "http://a:1"], ["--timeout", "0"]], ids=" ".join)
def test_each_command_checks_target_and_timeout(
    command: Callable[[Sequence[str]], int], argument: list[str], capsys: Output
) -> None:
    model = ["m"] if command in (infer.main, commands.describe) else []
    assert f"argument {argument[0]}: expected" in refusal(capsys, command, [*model, *argument])


def test_an_infinite_timeout(server: ScriptedServer) -> None:
    assert commands.models(["--target", server.target, "--timeout", "inf"]) == 0


@pytest.mark.parametrize("command", [infer.main, commands.models, commands.describe])
def test_help_is_available(command: Callable[[Sequence[str]], int], capsys: Output) -> None:
    with pytest.raises(SystemExit) as caught:
        command(["--help"])
    assert caught.value.code == 0
    assert "--target" in capsys.readouterr().out


def test_ready_returns_the_exit_status(server: ScriptedServer, capsys: Output) -> None:
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
    command: str, arguments: list[str], said: str, capsys: Output
) -> None:
    function = infer.main if command == "infer" else getattr(commands, command)
    assert (
        refusal(capsys, function, arguments) == f"tensorferry {command}: {said} (--help shows all options)\n"
    )


@pytest.mark.parametrize("command", [commands.models, commands.ready])
def test_the_environment_names_the_target(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, command: Callable[[Sequence[str]], int]
) -> None:
    monkeypatch.setenv("TENSORFERRY_TARGET", server.target)
    assert command([]) == 0
    monkeypatch.setenv("TENSORFERRY_TARGET", "127.0.0.1:1")
    assert command(["--target", server.target]) == 0


def test_a_wrong_target_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TENSORFERRY_TARGET", "http://a:1")
    assert refusal(capsys, commands.models, []).startswith(
        "tensorferry models: the environment variable TENSORFERRY_TARGET expects 'host:port', got 'http://a:1': write 'a:1'"
    )


def test_without_a_variable_the_target_is_this_machine() -> None:
    assert default_targets({}) == default_targets({"TENSORFERRY_TARGET": ""}) == ("127.0.0.1:8001",)


def test_names_cannot_control_the_terminal(server: ScriptedServer, capsys: Output) -> None:
    evil = "\x1b[31m\r\n\x07\u202e\x7f\x9b"
    metadata = model("m", {"x": "INT64 1"}, {"x": "INT64 1"})
    metadata.inputs[0].name = metadata.outputs[0].name = f"x{evil}"
    metadata.platform = f"p{evil}"
    metadata.properties["batching"] = f"unbatched ({evil})"
    server.servicer.models["m"] = metadata
    server.servicer.models[f"n{evil}"] = metadata
    for command, arguments in (
        (commands.models, []),
        (commands.describe, ["m"]),
        (infer.main, ["m", "--random"]),
    ):
        assert command([*arguments, "--target", server.target]) == 0
        out = capsys.readouterr().out
        assert all(line.isprintable() for line in out.split("\n"))
        assert "\\x1b[31m\\r\\n\\x07\\u202e\\x7f\\x9b" in out
    del server.servicer.models["m"].outputs[:]
    server.servicer.infer = lambda request, context: context.abort(grpc.StatusCode.INTERNAL, f"failed {evil}")
    assert infer.main(["m", "--random", "--target", server.target]) == 1
    assert bench.main([server.target, "m"]) == 1
    err = capsys.readouterr().err
    assert all(line.isprintable() for line in err.split("\n"))
    assert err.count("\n") == 2
