"""The command line of `tensorferry serve`: switches, help, the ready line, and exit."""

from __future__ import annotations

import pytest

from tensorferry.server.cli import one_process, reloading, serve
from tensorferry.server.config.server_config import GROUPS, OPTIONS, ServerConfig
from tensorferry.server.startup import describe_models


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations that `main` would serve."""
    configs: list[ServerConfig] = []

    def served(config: ServerConfig, output: None) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(one_process, "run_one_process", served)
    monkeypatch.setattr(reloading, "serve_reloading", lambda config, argv, file: served(config, None))
    return configs


def test_a_switch_has_all_forms_and_never_consumes_a_model(served: list[ServerConfig]) -> None:
    name = "fp16"
    forms: dict[bool, list[list[str]]] = {
        True: [[f"--{name}"], [f"--{name}=true"], [f"--{name}", "true"], [f"--{name}", "TRUE"]],
        False: [[f"--no-{name}"], [f"--{name}=false"], [f"--{name}", "false"], [f"--{name}=False"]],
    }
    for on, texts in forms.items():
        for text in texts:
            for arguments in (["a.onnx", *text], [*text, "a.onnx"], ["a.onnx", *text, "b.onnx"]):
                served.clear()
                assert serve.main(arguments) == 0
                (config,) = served
                assert config.fp16 is on
                models = [argument for argument in arguments if argument.endswith(".onnx")]
                assert [str(source.path) for source in config.models] == models


def test_all_arguments_after_two_dashes_are_models(served: list[ServerConfig]) -> None:
    assert serve.main(["a.onnx", "--fp16", "--", "true", "m=--fp16", "-d/n.onnx"]) == 0
    assert [(source.name, str(source.path)) for source in served[0].models] == [
        ("a", "a.onnx"),
        ("true", "true"),
        ("m", "--fp16"),
        ("n", "-d/n.onnx"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # No abbreviations, because a later version with a similar flag would change their meaning.
        (["--max-batch", "4", "m.onnx"], "unknown flag --max-batch; did you mean --max-batch-size?"),
        (["m.onnx", "--no-fp-16"], "unknown flag --no-fp-16; did you mean --no-fp16?"),
        (["m.onnx", "--qqqqqq"], "unknown flag --qqqqqq"),
        (["m.onnx", "--port"], "argument --port: expected one argument"),
    ],
)
def test_an_unknown_flag_is_reported_in_one_line_with_the_nearest_flag(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"tensorferry serve: {message} (--help shows all options)\n"


def test_an_unknown_variable_is_logged_as_a_warning(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("MAX_BATCH", "SERVICE_HOST", "SERVICE_PORT_GRPC", "PORT_8001_TCP_ADDR", "TOKEN", "HOST"):
        monkeypatch.setenv(f"TENSORFERRY_{name}", "localhost")
    assert serve.main(["m.onnx"]) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable TENSORFERRY_MAX_BATCH is not an option and has no effect; did you mean "
        "TENSORFERRY_MAX_BATCH_SIZE?"
    ]


def test_help_shows_every_option_once_with_its_metavar(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    help = capsys.readouterr().out
    for option in OPTIONS:
        assert help.count(f"  --{option.flag} {option.parser.metavar}") == 1
    for title in GROUPS:
        assert f"\n{title}:\n" in help
    assert "(default: 64MiB)" in help


def test_the_ready_line_describes_few_models_and_names_some_of_many() -> None:
    def model(number: int) -> dict[str, str]:
        return {"name": f"m{number}", "signature": "(x: FP32 [b])", "batching": "proved"}

    assert describe_models([]) == "no model"
    assert describe_models([model(0), model(1)]) == "m0(x: FP32 [b]), proved; m1(x: FP32 [b]), proved"
    assert describe_models([model(0) | {"signature": "x" * 300}]) == f"m0{'x' * 300}, proved"
    long = [model(number) | {"signature": "x" * 300} for number in range(3)]
    assert describe_models(long) == "3 models, m0, m1, m2 (tensorferry models lists them)"
    named = describe_models([model(0) | {"name": "n" * 60}, model(1) | {"name": "o" * 60}])
    assert named == f"2 models, {'n' * 60} and 1 more (tensorferry models lists them)"
    many = describe_models([model(number) for number in range(400)])
    assert many == ("400 models, m0, m1, m2, m3, m4, m5, m6, m7 and 392 more (tensorferry models lists them)")
