"""The shell commands against a running server."""

from __future__ import annotations

import io
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

import grpc
import pytest
from client.calls import Output, refusal
from client.scripted import ScriptedServer, model

from tensorferry.client import InferenceClient
from tensorferry.client.cli import bench, commands, infer


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


def test_describe_streams_to_a_model_that_answers_in_streams(server: ScriptedServer, capsys: Output) -> None:
    server.servicer.models["m"] = model("m", {"x": "FP32 1"}, {})
    server.servicer.models["m"].properties["streams"] = "true"
    assert commands.describe(["m", "--target", server.target]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1].endswith(" inference.GRPCInferenceService/ModelStreamInfer")
    )


@pytest.mark.parametrize("shape", ["-1", "-1 100"])
def test_describe_without_an_example(server: ScriptedServer, capsys: Output, shape: str) -> None:
    server.servicer.models["m"] = model("m", {"x": f"FP8 {shape}"}, {})
    assert commands.describe(["m", "--target", server.target]) == 0
    assert "no example: input 'x' of model 'm' expects FP8" in capsys.readouterr().out


def test_an_error_is_one_line(server: ScriptedServer, capsys: Output) -> None:
    command: Callable[[Sequence[str]], int]
    for command, name in ((commands.describe, "describe"), (infer.main, "infer"), (bench.main, "bench")):
        assert command(["nothing", "--target", server.target]) == 1
        expected = f"tensorferry {name}: {server.target}: NOT_FOUND: no model 'nothing'\n"
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize("command", [commands.ready, commands.models, bench.main])
def test_ctrl_c_is_quiet(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, command: Callable[[Sequence[str]], int]
) -> None:
    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(InferenceClient, "__enter__", interrupt)
    assert command(["m"] if command is bench.main else []) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_has_exited_is_no_error(
    server: ScriptedServer, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tensorferry` itself ends without an error."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        commands.models(["--target", server.target])
    assert capsys.readouterr().err == ""


def test_each_command_checks_target_and_timeout_and_has_help(server: ScriptedServer, capsys: Output) -> None:
    command: Callable[[Sequence[str]], int]
    for command in (infer.main, commands.describe, commands.models, commands.ready):
        words = ["m"] if command in (infer.main, commands.describe) else []
        for argument in (["--target", "http://a:1"], ["--timeout", "0"]):
            assert f"argument {argument[0]}: expected" in refusal(capsys, command, [*words, *argument])
        with pytest.raises(SystemExit) as caught:
            command(["--help"])
        assert caught.value.code == 0
        assert "--target" in capsys.readouterr().out
    assert commands.models(["--target", server.target, "--timeout", "inf"]) == 0


def test_ready_returns_the_exit_status(server: ScriptedServer, capsys: Output) -> None:
    assert commands.ready(["--target", server.target, "--timeout", "30"]) == 0
    server.servicer.ready = False
    assert commands.ready(["--target", server.target, "--timeout", "30"]) == 1
    assert commands.ready(["--target", "127.0.0.1:1", "--timeout", "30"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"tensorferry ready: {server.target}: UNAVAILABLE: the server runs, but is not ready: tensorferry models shows its models",
        "tensorferry ready: 127.0.0.1:1: UNAVAILABLE: no server answers; is `tensorferry serve` running there?",
    ]


@pytest.mark.parametrize(("command", "words"), [(commands.models, []), (bench.main, ["m"])])
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "is `tensorferry serve` running there?"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "this port speaks another protocol, such as HTTP/1.1"),
    ],
)
def test_a_port_without_the_server_is_answered_with_what_to_check(
    command: Callable[..., int], words: list[str], answer: bytes | None, said: str, capsys: Output
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        target = f"127.0.0.1:{listening.getsockname()[1]}"
        if answer is None:
            listening.close()
        else:
            Thread(target=answer_all, args=(listening, answer), daemon=True).start()
        assert command([*words, "--target", target]) == 1
        if answer is not None:
            # Ends the thread, which `close` would not.
            listening.shutdown(socket.SHUT_RDWR)
    assert said in capsys.readouterr().err


def answer_all(listening: socket.socket, answer: bytes) -> None:
    """Answer each connection, until the socket is closed."""
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(answer)


def test_wrong_arguments_are_one_line_with_the_nearest_flag(capsys: Output) -> None:
    for function, name, arguments, said in (
        (infer.main, "infer", ["m", "--imput", "x=a.npy"], "unknown flag --imput; did you mean --input?"),
        (commands.describe, "describe", ["m", "--time=3"], "unknown flag --time; did you mean --timeout?"),
        (commands.models, "models", ["--qqqq"], "unknown flag --qqqq"),
        (commands.ready, "ready", ["now"], "unexpected argument 'now'"),
        (commands.ready, "ready", ["--target"], "argument --target: expected one argument"),
    ):
        assert (
            refusal(capsys, function, arguments) == f"tensorferry {name}: {said} (--help shows all options)\n"
        )


def test_the_environment_names_the_target(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("TENSORFERRY_TARGET", server.target)
    assert commands.models([]) == commands.ready([]) == 0
    monkeypatch.setenv("TENSORFERRY_TARGET", "http://a:1")
    assert commands.models(["--target", server.target]) == 0
    assert refusal(capsys, commands.models, []).startswith(
        "tensorferry models: the environment variable TENSORFERRY_TARGET expects 'host:port', got 'http://a:1': write 'a:1'"
    )


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
