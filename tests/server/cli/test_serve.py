"""The command line of `tensorferry serve`: switches, and signals whichever thread they reach."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any, NoReturn

import pytest
from support.server.rig import PATIENCE, signature, spec

from tensorferry.batcher import Batcher
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.cli import serve
from tensorferry.server.config.option import Option
from tensorferry.server.config.server_config import GROUPS, OPTIONS, ServerConfig
from tensorferry.server.models.registry import Model


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations that `main` would have served."""
    configs: list[ServerConfig] = []

    def served(config: ServerConfig, output: None) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(serve, "_serve", served)
    monkeypatch.setattr("tensorferry.server.telemetry.logs.configure", lambda *args: None)
    return configs


SWITCHES = [option for option in OPTIONS if option.parser.switch]


@pytest.mark.parametrize("option", SWITCHES, ids=lambda option: option.flag)
def test_every_switch_takes_all_forms_and_leaves_the_models_alone(
    served: list[ServerConfig], option: Option
) -> None:
    name = option.flag
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
                assert getattr(config, option.field) == option.parser.parse(str(on))
                models = [argument for argument in arguments if argument.endswith(".onnx")]
                assert [str(source.path) for source in config.models] == models


def test_sizes_stand_behind_their_switch_too(served: list[ServerConfig]) -> None:
    assert serve.main(["--cuda-graphs", "1,8", "m.onnx", "--device", "cuda"]) == 0
    assert served[0].cuda_graphs == (1, 8)
    assert [str(source.path) for source in served[0].models] == ["m.onnx"]


def test_behind_two_dashes_all_are_models(served: list[ServerConfig]) -> None:
    assert serve.main(["--fp16", "--", "true", "m=--fp16"]) == 0
    assert [(source.name, str(source.path)) for source in served[0].models] == [
        ("true", "true"),
        ("m", "--fp16"),
    ]


def test_a_switch_is_true_or_false(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--allow-shared-memory=yes", "m.onnx"]) == 2
    assert "--allow-shared-memory is 'yes'; it must be true or false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        # Else one that is cut short would mean another once there is one more.
        (["--max-batch", "4", "m.onnx"], "unknown flag --max-batch; did you mean --max-batch-size?"),
        (["m.onnx", "--prot=3"], "unknown flag --prot; did you mean --port?"),
        (["m.onnx", "--no-fp-16"], "unknown flag --no-fp-16; did you mean --no-fp16?"),
        (["m.onnx", "--qqqqqq"], "unknown flag --qqqqqq"),
        (["m.onnx", "-p", "3"], "unknown flag -p"),
        (["m.onnx", "--port"], "argument --port: expected one argument"),
    ],
)
def test_a_wrong_flag_is_one_line_with_the_nearest(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"tensorferry serve: {said} (--help shows all options)\n"


def test_metrics_can_be_switched_off_again(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORFERRY_METRICS_PORT", "8002")
    assert serve.main(["m.onnx", "--metrics-port", "none"]) == 0
    assert served[0].metrics_port is None


def test_an_unknown_variable_is_warned_of(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("MAX_BATCH", "SERVICE_HOST", "SERVICE_PORT_GRPC", "PORT_8001_TCP_ADDR", "TOKEN", "HOST"):
        monkeypatch.setenv(f"TENSORFERRY_{name}", "localhost")
    assert serve.main(["m.onnx"]) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable TENSORFERRY_MAX_BATCH is not an option and has no effect; did you mean "
        "TENSORFERRY_MAX_BATCH_SIZE?"
    ]


def test_help_has_every_option_once_in_its_group_with_its_form(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    help = capsys.readouterr().out
    for option in OPTIONS:
        assert help.count(f"  --{option.flag} {option.parser.metavar}") == 1
    for title in GROUPS:
        assert f"\n{title}:\n" in help
    words = " ".join(help.split())
    for shown in (
        "(default: 64MiB)",
        "(default: 1GiB)",
        "--transport auto|lane|threaded",
        "--tf32 [true|false]",
    ):
        assert shown in words


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)
def test_a_default_that_is_shown_is_the_default(option: Option) -> None:
    shown = option.default_text
    if shown is not None:
        assert option.parser.parse(shown) == getattr(ServerConfig(()), option.field)


def test_help_shows_defaults_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    help = " ".join(capsys.readouterr().out.split())
    assert "8,1 gives two classes (default: 1)" in help
    assert "(default: (" not in help


def test_the_readiness_line_stays_readable() -> None:
    def model(number: int) -> Model:
        batcher = Batcher(ScriptedRunner(), 4)
        batcher.close()
        return Model(f"m{number}", "1", signature(spec("x", "FP32", "b")), 4, "proved", batcher)

    assert serve._listed([]) == "no model"
    assert serve._listed([model(0), model(1)]) == f"{model(0)}; {model(1)}"
    many = serve._listed([model(number) for number in range(400)])
    assert many == ("400 models, m0, m1, m2, m3, m4, m5, m6, m7 and 392 more (tensorferry models lists them)")


_TAKEN_BY_ANOTHER_THREAD = f"""
import queue, signal, threading
from tensorferry.server.cli.serve import _hear_signals

events = queue.SimpleQueue()
_hear_signals(events)

def take():
    # As the kernel may choose: to this thread, not to the main one, which waits.
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Event().wait()

threading.Timer(0.2, take).start()
print(events.get(timeout={PATIENCE}), flush=True)
import os; os._exit(0)
"""


def test_a_signal_that_another_thread_takes_is_an_event() -> None:
    """The handler of such a one waits for the main thread to wake, which nothing does."""
    heard = subprocess.run(
        [sys.executable, "-c", _TAKEN_BY_ANOTHER_THREAD],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=2 * PATIENCE,
    )
    assert heard.stdout == "15\n", heard.stderr


class _LoadsForLong:
    """An App that still loads its models when it is drained and stopped."""

    loading, enough = threading.Event(), threading.Event()

    def __init__(self, config: ServerConfig, *others: Any) -> None:
        self.config = config

    def start(self) -> None: ...

    def load(self) -> None:
        self.loading.set()
        assert self.enough.wait(PATIENCE)
        raise RuntimeError("after the end")

    def drain(self) -> bool:
        return True

    def stop(self) -> bool:
        return True


class _Left(BaseException):
    """The process is over."""


def test_who_is_stopped_while_models_load_does_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes back from ONNX Runtime as the interpreter ends would abort the process: 134, not 0."""

    def hear(events: Any) -> None:
        def term() -> None:
            assert _LoadsForLong.loading.wait(PATIENCE)
            events.put(signal.SIGTERM)

        threading.Thread(target=term, daemon=True).start()

    def leave(code: int, output: Any) -> NoReturn:
        raise _Left(code)

    monkeypatch.setattr(serve, "App", _LoadsForLong)
    monkeypatch.setattr(serve, "_hear_signals", hear)
    monkeypatch.setattr(serve, "_leave", leave)
    monkeypatch.setattr(serve, "watch_threads", lambda lost: None)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    try:
        with pytest.raises(_Left) as left:
            serve._serve(ServerConfig(()), None)  # type: ignore[arg-type]
    finally:
        _LoadsForLong.enough.set()
    assert left.value.args == (0,)
