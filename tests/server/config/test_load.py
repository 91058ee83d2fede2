"""Precedence of flag, environment, file and default; errors name the value and what is allowed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorferry.server.config.flags import ELSEWHERE, REPLACED
from tensorferry.server.config.load import load_config, model_source
from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.config.server_config import OPTIONS, ModelSource, ServerConfig
from tensorferry.server.errors import ConfigError
from tensorferry.server.startup import read_config

BY_FLAG = {option.flag: option for option in OPTIONS}

# By an option of each parser: valid texts with their values, and texts that are not valid.
PARSERS: dict[str, tuple[list[tuple[str, Any]], list[str]]] = {
    "reload": ([("true", True), ("FALSE", False)], ["", "1", "no"]),
    "max-batch-size": ([("0", 0), ("1048576", 1 << 20)], ["", "-1", "1048577", "many", "1.5"]),
    # The core of grpc ends the process, or takes no such number.
    "max-connections": ([("1073741824", 1 << 30)], ["-1", "2147483647"]),
    "max-calls-per-connection": ([("1073741824", 1 << 30)], ["-1", "2147483648"]),
    "max-calls": ([("1", 1), ("100000", 100_000)], ["0", "-1", "1e3"]),
    "priority-weights": ([("8,1", (8, 1)), ("[4, 2, 1]", (4, 2, 1))], ["", "0", "8,0", "8,", "4;8", "1.5"]),
    "client-rate": ([("0", 0.0), ("1e3", 1000.0)], ["", "-1", "nan", "inf", "5/s"]),
    "fp16-tolerance": ([("1e-3", 0.001)], ["", "0", "-1", "nan", "inf", "1 %"]),
    "drain-seconds": ([("0", 0.0), ("1e9", 1e9)], ["", "-1", "nan", "inf", "1s", "1e10"]),
    "repository-poll-seconds": ([("0.5", 0.5)], ["", "0", "-1", "nan", "inf", "15s", "1e10"]),
    "slo-ms": ([("0", 0.0), ("2.5", 0.0025)], ["", "-1", "nan", "inf", "1ms", "1e13"]),
    "max-message-bytes": (
        [("1", 1), ("2147483647", (1 << 31) - 1), ("3 MiB", 3 << 20), ("5KiB", 5 << 10)],
        ["", "0", "2147483648", "2 GiB", "-1", "1.5 GiB", "1 GB", "1 gib", "KiB"],
    ),
    "log-level": ([("debug", "debug"), ("ERROR", "error")], ["", "trace", "warn", "10"]),
    "tls-key": ([("/var/t", Path("/var/t")), ("b c", Path("b c"))], ["", " ", "a\0"]),
    "host": (
        [("::1", "::1"), ("some-host.example", "some-host.example")],
        ["", "a b", "a/b", "a,b", "http://a"],
    ),
    "http-cors-origins": (
        [
            ("*", ("*",)),
            ("https://A.example:443, http://localhost:3000", ("https://a.example", "http://localhost:3000")),
            ("app://-,http://[::1]:80", ("app://-", "http://[::1]")),
        ],
        ["", "null", "a.example", "https://a.example/", "https://*.a.example", "*,https://a.example"],
    ),
    "model-repository": ([("a:/b c", (Path("a"), Path("/b c")))], ["", ":a", "a:", "a::b", "a:b\0"]),
    "custom-ops": (
        [("onnxruntime-extensions:/b c.so", ("onnxruntime-extensions", "/b c.so"))],
        ["", ":a", "a:", "a::b", "a\0"],
    ),
    "embeddings": ([("a,n=b", ("a", "n=b"))], ["", "a,", "a\0"]),
    "load-model": ([("*", ("*",)), ("a,b.c", ("a", "b.c"))], ["", "a,", "a b", "../a", "a,*", "-a"]),
    "device": (
        [("cpu", "cpu"), ("cuda", "cuda"), ("cuda:12,00", "cuda:12,0")],
        ["", "gpu", "cuda:", "cuda:-1", "cuda:1234", "CPU", "cuda:0\n", "cuda:1,01", "cuda:0,cpu"],
    ),
    "providers": (
        [("OpenVINO", ("openvino",)), ("TensorRT, onnxruntime-ep-a-1", ("tensorrt", "onnxruntime-ep-a-1"))],
        [
            "",
            "cuda",
            "tensorrt,",
            "tensorrt,tensorrt",
            "CPUExecutionProvider",
            "onnxruntime-ep-",
            "onnxruntime-ep-a.b",
        ],
    ),
    "cuda-graphs": ([("true", ()), ("False", None), ("1,8", (1, 8))], ["", "yes", "0", "1,0", "1;2"]),
    "batching": ([("trust", "trust"), ("PROVED", "proved"), ("prove", "tested")], ["", "off", "true"]),
    "pad-lengths": (
        [("n=1", PadLengths("n", (1,))), ("a=b + 1=2, 40", PadLengths("a=b + 1", (2, 40)))],
        ["", "16", "=16", "n=", "n=0", "n=8,4", "n=4,4", "n=4,,8", "n=-1,2", "n=1.5"],
    ),
    "pad-values": (
        [("x=-1e9", (("x", "-1e9"),)), ("x=,y=a=b", (("x", ""), ("y", "a=b")))],
        ["", "ids", "=0", "ids=0,", "ids=0,mask", "ids=0,ids=1"],
    ),
    "state": (
        [("a=b,c=d", (("a", "b"), ("c", "d")))],
        ["", "a", "a=", "=b", "a=b,", "a=b,a=c", "a=b,c=b"],
    ),
    "processes": ([("auto", None), ("1", 1)], ["", "0", "-1", "257", "two", "none"]),
    "metrics-port": ([("0", 0), ("None", None)], ["", "-1", "65536", "on"]),
    "client-weights": (
        [("10.0.0.1=4,2001:db8::/64=2", (("10.0.0.1", 4), ("2001:db8::/64", 2)))],
        ["", "a", "=1", "a=0", "a=1,", "a=1,a=2", "a=-1", "a=1.5", "a=1000000"],
    ),
}


def load(
    flags: Mapping[str, str | None] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    models: Sequence[str] = ("m.onnx",),
) -> ServerConfig:
    return load_config(models, flags or {}, environment or {}, file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a configuration file."""
    return tmp_path / "config.toml"


def test_the_table_of_options_is_well_formed() -> None:
    fields = {field.name for field in dataclasses.fields(ServerConfig)} - {"models", "model_options"}
    assert {option.field for option in OPTIONS} == fields
    assert len(BY_FLAG) == len({option.variable for option in OPTIONS}) == len(OPTIONS) == len(fields)
    for option in OPTIONS:
        text = option.default_text
        assert text is None or option.value(text, "default") == option.default, option.flag
        assert option.help
        assert not option.accepts("")
        assert option.flag not in REPLACED


def test_precedence_is_flag_then_environment_then_file(file: Path) -> None:
    file.write_text('max-calls = "3"\n')
    flags, environment = {"max-calls": "1"}, {"TENSORFERRY_MAX_CALLS": "2"}
    assert load(flags, environment, file).max_calls == 1
    assert load({"max-calls": None}, environment, file).max_calls == 2
    assert load({}, {}, file).max_calls == 3


@pytest.mark.parametrize("flag", PARSERS)
def test_a_value_is_parsed_or_reported_with_its_option_and_what_is_allowed(flag: str) -> None:
    option = BY_FLAG[flag]
    good, bad = PARSERS[flag]
    for text, value in good:
        assert option.value(text, "flag") == value
    for text in bad:
        with pytest.raises(ConfigError) as caught:
            option.value(text, "flag")
        assert str(caught.value) == f"flag is {text!r}; it must be {option.parser.allowed}"


def test_an_error_names_the_place_of_the_value(file: Path) -> None:
    file.write_text("max_calls = 0")
    for place, where in (
        ("--max-calls", {"flags": {"max-calls": "0"}}),
        ("TENSORFERRY_MAX_CALLS", {"environment": {"TENSORFERRY_MAX_CALLS": "0"}}),
        (f"max-calls in {file}", {"file": file}),
    ):
        given: dict[str, Any] = {**where}
        with pytest.raises(ConfigError) as caught:
            load(**given)
        assert str(caught.value) == f"{place} is '0'; it must be an integer of at least 1"


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("max_queue_delay_ms = 2.5", "max_queue_delay", 0.0025),
        ("priority-weights = [8, 1]", "priority_weights", (8, 1)),
        ('fair-share = true\nclient-weights = ["a=2", "b=3"]', "client_weights", (("a", 2), ("b", 3))),
    ],
)
def test_a_file_has_toml_values_and_keys_with_hyphens_or_underscores(
    line: str, field: str, value: Any, file: Path
) -> None:
    file.write_text(line)
    assert getattr(load(file=file), field) == value


@pytest.mark.parametrize("line", ["port = true", "port = 80.0", "port = [1]", "log-level = 3", "device = {}"])
def test_a_value_of_the_wrong_type_in_a_file_is_an_error(line: str, file: Path) -> None:
    file.write_text(line)
    with pytest.raises(ConfigError, match="it must be"):
        load(file=file)


@pytest.mark.parametrize("flag", ELSEWHERE)
def test_a_flag_of_another_server_is_answered_with_ours(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_config(["m.onnx", f"{flag}=1"])
    ours = ELSEWHERE[flag]
    assert f"unknown flag {flag}; did you mean {ours}?" in capsys.readouterr().err
    assert ours.split()[0].removeprefix("--") in BY_FLAG


@pytest.mark.parametrize("flag", REPLACED)
def test_a_replaced_option_is_an_error_that_names_its_replacement(
    flag: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = flag.replace("-", "_")
    said = f"is replaced by {REPLACED[flag]}"
    for argument in (f"--{flag}", f"--{flag}=auto", f"--no-{flag}"):
        with pytest.raises(SystemExit) as ended:
            read_config(["m.onnx", argument])
        assert ended.value.code == 2
        assert f"{argument.partition('=')[0]} {said}" in capsys.readouterr().err
    cases: list[tuple[str, str, dict[str, str]]] = [
        (f"TENSORFERRY_{key.upper()}", "", {f"TENSORFERRY_{key.upper()}": "0"}),
        (f"{flag} in {file}", f"{flag} = 2", {}),
        (f"{flag} in {file}", f"{key} = 2", {}),
        (f"{flag} in [models.m] of {file}", f"[models.m]\n{key} = 2", {}),
    ]
    for place, text, environment in cases:
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(environment=environment, file=file)
        assert str(caught.value) == f"{place} {said}"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("prot", "'prot'; did you mean port?"),
        ("max_batch", "'max_batch'; did you mean max-batch-size?"),
        ("repository", "'repository'; did you mean model-repository?"),
        ("qqqqqq", "'qqqqqq'; tensorferry serve --help shows all options"),
    ],
)
def test_an_unknown_key_is_reported_with_the_nearest_option(file: Path, key: str, message: str) -> None:
    file.write_text(f"port = 1\n{key} = 2\n")
    with pytest.raises(ConfigError) as caught:
        load(file=file)
    assert str(caught.value) == f"{file} has the unknown key {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"port =", "which is not valid TOML"),
        (b"\xff", "must be a readable TOML file"),
        (None, "must be a readable TOML file"),
    ],
)
def test_an_unreadable_file_is_an_error(content: bytes | None, message: str, file: Path) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(file=file)
    assert str(file) in str(caught.value)


def test_a_file_is_utf_8_in_every_locale(file: Path) -> None:
    file.write_bytes('models = ["m.onnx"]  # é'.encode())
    code = f"from tensorferry.server.config.load import *; load_config([], {{}}, {{}}, Path({str(file)!r}))"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **ascii_only}, check=True)


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("m.onnx", "m", "m.onnx"),
        ("name=/models/m.onnx", "name", "/models/m.onnx"),
        ("name=a=b.onnx", "name", "a=b.onnx"),
        ("./a=b/m.onnx", "m", "./a=b/m.onnx"),
        ("./a=b/app.py", "./a=b/app.py", "./a=b/app.py"),
    ],
)
def test_a_model_is_a_path_or_a_name_and_a_path(text: str, name: str, path: str) -> None:
    assert model_source(text) == ModelSource(name, Path(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(
            (f"{name}=m.onnx", "a name starts with a letter or digit")
            for name in ("", "a b", ".a", "x" * 129)
        ),
        ("..", "a name starts with a letter or digit"),
        ("", r"it must be path\.onnx, name=path\.onnx or path\.py"),
        ("name=", r"it must be path\.onnx, name=path\.onnx or path\.py"),
        ("name=app.py", r"a Python file names its models itself: give app\.py alone"),
    ],
)
def test_a_name_or_a_path_that_is_not_allowed_is_an_error(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        model_source(text)
    assert f"MODEL is {text!r}" in str(caught.value)


def test_a_directory_is_no_model_and_the_error_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a directory; give path.onnx or path.py"):
        model_source(str(tmp_path))
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").touch()
    with pytest.raises(ConfigError, match=f"it has the models m; give --model-repository {tmp_path}"):
        model_source(str(tmp_path))
    with pytest.raises(ConfigError, match=f"a model of a repository; give --model-repository {tmp_path}"):
        model_source(str(tmp_path / "m"))
    for number in range(5):
        (tmp_path / "m" / f"{number}.onnx").touch()
    (tmp_path / "m" / "1" / "model.onnx").unlink()
    with pytest.raises(
        ConfigError, match=r"it has .*/0.onnx, .*/1.onnx, .*/2.onnx and 2 more; name a file itself"
    ):
        model_source(str(tmp_path / "m"))


def test_a_directory_that_may_not_be_read_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (private := tmp_path / "private").mkdir()
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").touch()
    entries = Path.iterdir

    def iterdir(self: Path) -> Iterator[Path]:
        if self == private:
            raise PermissionError
        return entries(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(ConfigError, match=r"a directory; give path.onnx or path.py"):
        model_source(str(private))
    with pytest.raises(ConfigError, match="it has the models m; give --model-repository"):
        model_source(str(tmp_path))


def test_two_models_with_one_name_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"two models are named 'm'; rename one of them by name=path\.onnx"):
        load(models=["a/m.onnx", "n=n.onnx", "b/m.onnx"])


def test_the_models_of_the_file_are_used_if_the_command_line_has_none(file: Path) -> None:
    file.write_text('models = ["a.onnx", "b=c.onnx"]')
    assert [source.name for source in load(models=[], file=file).models] == ["a", "b"]
    assert [source.name for source in load(models=["x.onnx"], file=file).models] == ["x"]


@pytest.mark.parametrize("line", ['models = "a.onnx"', "models = [1]", "models = 3"])
def test_the_models_of_the_file_must_be_a_list_of_strings(line: str, file: Path) -> None:
    file.write_text(line)
    with pytest.raises(ConfigError, match=r"it must be a list of path\.onnx or name=path\.onnx"):
        load(models=[], file=file)


def test_addresses_stand_where_paths_do(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"""
        model-repository = ["models", "s3://bucket/models"]
        [models.a]
        path = "https://user:secret@host/x.onnx#sha256={"ab" * 32}"
    """)
    config = load(file=file, models=())
    (model,) = config.models
    assert (model.name, model.path, str(model.origin)) == ("a", Path("x.onnx"), "https://host/x.onnx")
    assert "secret" not in repr(config)
    assert list(map(str, config.model_repositories)) == ["models", "s3://bucket/models"]
    named = load(
        models=["hf://org/repo/m.onnx", "b=s3://bucket/key?versionId=1", "c=gs://bucket/k=1.onnx"]
    ).models
    assert [(model.name, str(model.origin)) for model in named] == [
        ("m", "hf://org/repo/m.onnx"),
        ("b", "s3://bucket/key?versionId=1"),
        ("c", "gs://bucket/k=1.onnx"),
    ]


def test_repositories_may_be_paths_and_addresses() -> None:
    config = load(flags={"model-repository": "/a:s3://b/c:gs://d:e"})
    assert list(map(str, config.model_repositories)) == ["/a", "s3://b/c", "gs://d/", "e"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("https://host/a%20b.onnx?token=s3cr3t", "its name 'a b' is not allowed"),
        ("a=https://host/app.py", "is Python code"),
        ("-=s3://bucket/m.onnx", "its name '-' is not allowed"),
    ],
)
def test_a_bad_address_is_reported_without_its_secrets(model: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load(models=[model])
    assert "s3cr3t" not in str(caught.value)
