"""Precedence of flag, environment, file and default; errors name the value and what is allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorferry.server.config.load import load_config, model_source
from tensorferry.server.config.option import Option, OptionScope
from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.config.server_config import OPTIONS, ModelSource, ServerConfig
from tensorferry.server.errors import ConfigError
from tensorferry.server.startup import read_config

BY_FLAG = {option.flag: option for option in OPTIONS}

# Three valid texts of each option, with their values.
GOOD: dict[str, list[tuple[str, Any]]] = {
    "model-repository": [
        ("/a", (Path("/a"),)),
        ("a:/b c", (Path("a"), Path("/b c"))),
        ("a/b", (Path("a/b"),)),
    ],
    "custom-ops": [
        ("a.so", ("a.so",)),
        ("onnxruntime-extensions:/b c.so", ("onnxruntime-extensions", "/b c.so")),
        ("a/b.so.1", ("a/b.so.1",)),
    ],
    "model-control": [("explicit", "explicit"), ("POLL", "poll"), ("none", "none")],
    "load-model": [("*", ("*",)), ("a", ("a",)), ("a,b.c", ("a", "b.c"))],
    "repository-poll-seconds": [("1", 1.0), ("0.5", 0.5), ("1e3", 1000.0)],
    "model-cache": [("/a", Path("/a")), ("b", Path("b")), ("~c", Path("~c"))],
    "allow-http": [("true", True), ("FALSE", False), ("True", True)],
    "allow-remote-code": [("true", True), ("FALSE", False), ("True", True)],
    "exit-on-error": [("false", False), ("TRUE", True), ("False", False)],
    "reload": [("true", True), ("FALSE", False), ("True", True)],
    "host": [("0.0.0.0", "0.0.0.0"), ("::1", "::1"), ("some-host.example", "some-host.example")],
    "port": [("0", 0), ("65535", 65535), ("9000", 9000)],
    "transport": [("auto", "auto"), ("lane", "lane"), ("Threaded", "threaded")],
    "device": [("cpu", "cpu"), ("cuda", "cuda"), ("cuda:12,00", "cuda:12,0")],
    "instances": [("1", 1), ("64", 64), ("3", 3)],
    "threads": [("0", 0), ("64", 64), ("3", 3)],
    "inter-threads": [("0", 0), ("64", 64), ("3", 3)],
    "providers": [
        ("tensorrt", ("tensorrt",)),
        ("OpenVINO", ("openvino",)),
        ("TensorRT, openvino", ("tensorrt", "openvino")),
    ],
    "cuda-memory-bytes": [("1", 1), ("3 GiB", 3 << 30), ("5KiB", 5 << 10)],
    "cuda-memory-growth": [("exact", "exact"), ("Exact", "exact"), ("doubling", "doubling")],
    "cudnn-search": [("heuristic", "heuristic"), ("DEFAULT", "default"), ("exhaustive", "exhaustive")],
    "tf32": [("false", False), ("False", False), ("TRUE", True)],
    "fp16": [("true", True), ("False", False), ("TRUE", True)],
    "fp16-tolerance": [("0.1", 0.1), ("1e-3", 0.001), ("2", 2.0)],
    "fp16-except": [("Softmax", ("Softmax",)), ("a,/b/c", ("a", "/b/c")), ("node 1", ("node 1",))],
    "max-batch-size": [("0", 0), ("1048576", 1 << 20), ("8", 8)],
    "batching-rewrite": [("false", False), ("TRUE", True), ("False", False)],
    "batch-rows": [("max", "max"), ("MAX", "max"), ("pays", "pays")],
    "batching": [("trust", "trust"), ("PROVED", "proved"), ("prove", "tested")],
    "pad-lengths": [
        ("sequence=16,32", PadLengths("sequence", (16, 32))),
        ("n=1", PadLengths("n", (1,))),
        ("a=b + 1=2, 40", PadLengths("a=b + 1", (2, 40))),
    ],
    "pad-values": [
        ("ids=0,mask=0", (("ids", "0"), ("mask", "0"))),
        ("x=-1e9", (("x", "-1e9"),)),
        ("x=,y=a=b", (("x", ""), ("y", "a=b"))),
    ],
    "max-queue-delay-ms": [("0", 0.0), ("2.5", 0.0025), ("1e3", 1.0)],
    "cuda-graphs": [("true", ()), ("False", None), ("1,8", (1, 8))],
    "tensorrt-cache": [("engines", Path("engines")), ("/var/e", Path("/var/e")), ("b c", Path("b c"))],
    "preferred-batch-sizes": [("4", (4,)), ("4,8", (4, 8)), ("[2, 6]", (2, 6))],
    "priority-weights": [("1", (1,)), ("8,1", (8, 1)), ("[4, 2, 1]", (4, 2, 1))],
    "default-priority": [("0", 0), ("1", 1), ("01", 1)],
    "slo-ms": [("0", 0.0), ("25", 0.025), ("2.5", 0.0025)],
    "max-queue-size": [("1", 1), ("100000", 100_000), ("7", 7)],
    "max-queue-bytes": [("1", 1), ("3 GiB", 3 << 30), ("5KiB", 5 << 10)],
    "max-message-bytes": [("1", 1), ("2147483647", (1 << 31) - 1), ("16MiB", 16 << 20)],
    "drain-seconds": [("0", 0.0), ("0.5", 0.5), ("1e9", 1e9)],
    "drain-delay-seconds": [("0", 0.0), ("0.5", 0.5), ("600", 600.0)],
    "max-connection-age-seconds": [("0", 0.0), ("0.5", 0.5), ("600", 600.0)],
    "run-timeout-seconds": [("0", 0.0), ("0.5", 0.5), ("600", 600.0)],
    "exit-on-device-loss": [("true", True), ("False", False), ("TRUE", True)],
    "triton-status-codes": [("true", True), ("False", False), ("TRUE", True)],
    "allow-shared-memory": [("true", True), ("False", False), ("TRUE", True)],
    "allow-log-settings": [("true", True), ("False", False), ("TRUE", True)],
    "metrics-port": [("0", 0), ("None", None), ("8002", 8002)],
    "metrics-host": [("0.0.0.0", "0.0.0.0"), ("::", "::"), ("localhost", "localhost")],
    "otel": [("true", True), ("False", False), ("TRUE", True)],
    "access-log": [("0", 0), ("100", 100), ("7", 7)],
    "log-format": [("json", "json"), ("text", "text"), ("JSON", "json")],
    "log-level": [("debug", "debug"), ("ERROR", "error"), ("warning", "warning")],
    **{
        name: [("a.crt", Path("a.crt")), ("/var/t", Path("/var/t")), ("b c", Path("b c"))]
        for name in ("tls-certificate", "tls-key", "tls-client-ca", "auth-tokens", "auth-certificates")
    },
    "auth-exempt-health": [("false", False), ("TRUE", True), ("False", False)],
    "auth-over-plaintext": [("true", True), ("False", False), ("TRUE", True)],
    "reflection": [("false", False), ("TRUE", True), ("False", False)],
    "max-request-rows": [("5", 5), ("1", 1), ("7", 7)],
    "max-strings": [("1", 1), ("70000", 70_000), ("7", 7)],
    "max-string-bytes": [("1", 1), ("3 MiB", 3 << 20), ("5KiB", 5 << 10)],
    "max-unsent-bytes": [("1", 1), ("3 MiB", 3 << 20), ("5KiB", 5 << 10)],
    "max-calls": [("1", 1), ("100000", 100_000), ("7", 7)],
    "max-streams": [("1", 1), ("20000", 20_000), ("7", 7)],
    "max-in-flight-per-stream": [("1", 1), ("1000", 1000), ("7", 7)],
    "processes": [("auto", None), ("1", 1), ("16", 16)],
    "max-connections": [("5", 5), ("1000", 1000), ("7", 7)],
    "max-calls-per-connection": [("5", 5), ("1000", 1000), ("7", 7)],
    "max-metadata-bytes": [("1024", 1024), ("16777216", 1 << 24), ("8192", 8192)],
    "client-max-requests": [("5", 5), ("1000", 1000), ("7", 7)],
    "client-max-rows": [("5", 5), ("1000", 1000), ("7", 7)],
    "client-max-bytes": [("5", 5), ("3 GiB", 3 << 30), ("5KiB", 5 << 10)],
    "client-rate": [("0.5", 0.5), ("1e3", 1000.0), ("7", 7.0)],
    "client-burst": [("5", 5), ("1000", 1000), ("7", 7)],
    "fair-share": [("true", True), ("False", False), ("TRUE", True)],
    "client-weights": [
        ("a=2", (("a", 2),)),
        ("a=1,b=3", (("a", 1), ("b", 3))),
        ("10.0.0.1=4,2001:db8::/64=2", (("10.0.0.1", 4), ("2001:db8::/64", 2))),
    ],
}

# The other options that an option needs to be valid.
NEEDS = {
    "pad-values": {"pad-lengths": "sequence=16"},
    "fp16-tolerance": {"fp16": "true"},
    "fp16-except": {"fp16": "true"},
    "model-control": {"model-repository": "models"},
    "load-model": {"model-repository": "models", "model-control": "explicit"},
    "client-burst": {"client-rate": "5"},
    "client-weights": {"fair-share": "true"},
    "tls-certificate": {"tls-key": "a.key"},
    "tls-key": {"tls-certificate": "a.crt"},
    "tls-client-ca": {"tls-key": "a.key", "tls-certificate": "a.crt"},
    "auth-certificates": {"tls-client-ca": "ca.crt", "tls-key": "a.key", "tls-certificate": "a.crt"},
}

BAD: dict[str, list[str]] = {
    "model-repository": ["", ":a", "a:", "a::b"],
    "custom-ops": ["", ":a", "a:", "a::b"],
    "model-control": ["", "off", "manual"],
    "load-model": ["", "a,", "a b", "../a", "a,*", "-a"],
    "repository-poll-seconds": ["", "0", "-1", "nan", "inf", "15s", "1e10"],
    "model-cache": ["", " "],
    "allow-http": ["", "1", "no"],
    "allow-remote-code": ["", "1", "no"],
    "exit-on-error": ["", "1", "no"],
    "reload": ["", "1", "no"],
    "host": ["", "a b", "a/b", "a,b", "http://a"],
    "port": ["", "-1", "65536", "80.0", "http"],
    "transport": ["", "fast", "async"],
    "device": [
        *("", "gpu", "cuda:", "cuda:-1", "cuda:1234", "CPU", "cuda:0\n"),
        *(
            "cuda:0,0",
            "cuda:1,01",
            "cuda:0,",
            "cuda:,1",
            "cuda:0,cpu",
            "cpu,cuda:0",
            "cuda:0,cuda:1",
            "cuda:0, 1",
        ),
    ],
    "instances": ["", "0", "65", "1.5"],
    "threads": ["", "-1", "100000", "auto"],
    "inter-threads": ["", "-1", "100000", "auto"],
    "providers": ["", "cuda", "tensorrt,", "tensorrt,tensorrt", "CPUExecutionProvider"],
    "cuda-memory-bytes": ["", "0", "-1", "1.5 GiB", "1 GB"],
    "cuda-memory-growth": ["", "0", "kNextPowerOfTwo"],
    "cudnn-search": ["", "0", "fast"],
    "tf32": ["", "0", "off"],
    "fp16": ["", "1", "on"],
    "fp16-tolerance": ["", "0", "-1", "nan", "inf", "1 %"],
    "fp16-except": ["", ",", "a,", "a,,b", " a", "a, b"],
    "max-batch-size": ["", "-1", "1048577", "many", "1.5"],
    "batching-rewrite": ["", "1", "off"],
    "batch-rows": ["", "most", "32"],
    "batching": ["", "off", "true"],
    "pad-lengths": ["", "16", "=16", "n=", "n=0", "n=8,4", "n=4,4", "n=4,,8", "n=-1,2", "n=1.5"],
    "pad-values": ["", "ids", "=0", "ids=0,", "ids=0,mask", "ids=0,ids=1"],
    "max-queue-delay-ms": ["", "-1", "nan", "inf", "1ms", "-0.1", "1e13"],
    "cuda-graphs": ["", "yes", "0", "1,0", "1;2"],
    "tensorrt-cache": [""],
    "preferred-batch-sizes": ["", "0", "4,0", "4;8", "4,", "-4", "2.5"],
    "priority-weights": ["", "0", "8,0", "high", "8,", "-1", "1.5"],
    "default-priority": ["", "-1", "high", "1.5"],
    "slo-ms": ["", "-1", "nan", "inf", "1ms", "1e13"],
    "max-queue-size": ["", "0", "-5", "1e3"],
    "max-queue-bytes": ["", "0", "0 GiB", "-1", "1.5 GiB", "1 GB", "1 gib", "KiB"],
    "max-message-bytes": ["", "0", "2147483648", "2 GiB", "-1"],
    "drain-seconds": ["", "-1", "nan", "inf", "1s", "1e10"],
    "drain-delay-seconds": ["", "-1", "nan", "inf", "1s", "1e10"],
    "max-connection-age-seconds": ["", "-1", "nan", "inf", "1s", "1e10"],
    "run-timeout-seconds": ["", "-1", "nan", "inf", "1s", "1e10"],
    "exit-on-device-loss": ["", "yes", "1", "on"],
    "triton-status-codes": ["", "yes", "1", "on"],
    "allow-shared-memory": ["", "yes", "1", "on"],
    "allow-log-settings": ["", "yes", "1", "on"],
    "metrics-port": ["", "-1", "65536", "on"],
    "metrics-host": ["", "a b", "a/b", "http://a"],
    "otel": ["", "yes", "1", "on"],
    "access-log": ["", "-1", "1.5", "all", "true"],
    "log-format": ["", "xml"],
    "log-level": ["", "trace", "warn", "10"],
    "tls-certificate": ["", " "],
    "tls-key": ["", " "],
    "tls-client-ca": ["", " "],
    "auth-tokens": ["", " "],
    "auth-certificates": ["", " "],
    "auth-exempt-health": ["", "1", "no"],
    "auth-over-plaintext": ["", "yes", "1", "on"],
    "reflection": ["", "1", "off"],
    "max-request-rows": ["", "-1", "1e3", "many"],
    "max-strings": ["", "0", "-1", "1 MiB"],
    "max-string-bytes": ["", "0", "-1", "1.5 KiB"],
    "max-unsent-bytes": ["", "0", "-1", "1.5 KiB"],
    "max-calls": ["", "0", "-1"],
    "max-streams": ["", "0", "-1", "none"],
    "max-in-flight-per-stream": ["", "0", "-1"],
    "processes": ["", "0", "-1", "257", "two", "none"],
    "max-connections": ["", "-1", "none"],
    "max-calls-per-connection": ["", "-1", "none"],
    "max-metadata-bytes": ["", "0", "1023", "16777217", "8 KiB"],
    "client-max-requests": ["", "-1", "10%"],
    "client-max-rows": ["", "-1", "1.5"],
    "client-max-bytes": ["", "-1", "1 GB"],
    "client-rate": ["", "-1", "nan", "inf", "5/s"],
    "client-burst": ["", "-1", "1.5"],
    "fair-share": ["", "1", "on", "auto"],
    "client-weights": ["", "a", "=1", "a=0", "a=1,", "a=1,a=2", "a=-1", "a=1.5", "a=1000000"],
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


def test_every_option_is_tested() -> None:
    assert GOOD.keys() == BAD.keys() == BY_FLAG.keys()
    fields = {field.name for field in dataclasses.fields(ServerConfig)} - {"models", "model_options"}
    assert {option.field for option in OPTIONS} == fields


def test_defaults() -> None:
    assert load() == ServerConfig((ModelSource("m", Path("m.onnx")),))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)
def test_precedence_is_flag_then_environment_then_file(option: Option, file: Path) -> None:
    (in_flag, flag), (in_environment, variable), (in_file, key) = GOOD[option.flag]
    file.write_text(f'{option.flag} = "{in_file}"\n')
    flags, environment = {option.flag: in_flag}, {option.variable: in_environment}
    for other, needed in NEEDS.get(option.flag, {}).items():
        flags[other] = environment[BY_FLAG[other].variable] = needed
        file.write_text(f'{file.read_text()}{other} = "{needed}"\n')

    assert getattr(load(flags, environment, file), option.field) == flag
    without = {**flags, option.flag: None}
    assert getattr(load(without, environment, file), option.field) == variable
    assert getattr(load({}, {}, file), option.field) == key
    assert getattr(load(flags), option.field) == flag


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.per_model], ids=lambda option: option.flag
)
def test_an_option_of_one_model_can_be_in_its_table(option: Option, file: Path) -> None:
    needed = "".join(f'{other} = "{text}"\n' for other, text in NEEDS.get(option.flag, {}).items())
    for text, value in GOOD[option.flag]:
        file.write_text(f'[models.m]\n{option.flag} = "{text}"\n{needed}')
        config = load(file=file)
        assert config.model_options["m"][option.field] == value
        assert getattr(config.for_model("m"), option.field) == value
        assert getattr(config, option.field) == option.default


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if not option.per_model], ids=lambda option: option.flag
)
def test_an_option_of_the_whole_server_cannot_be_in_a_table(option: Option, file: Path) -> None:
    file.write_text(f'[models.m]\n{option.flag} = "{GOOD[option.flag][0][0]}"')
    with pytest.raises(ConfigError, match=f"'{option.flag}', which is an option of the whole server"):
        load(file=file)


@pytest.mark.parametrize(("flag", "text"), [(flag, text) for flag in BAD for text in BAD[flag]])
def test_a_bad_value_is_reported_with_its_option_and_what_is_allowed(
    flag: str, text: str, file: Path
) -> None:
    option = BY_FLAG[flag]
    file.write_text(f"{flag.replace('-', '_')} = '''{text}'''")
    sources: list[tuple[str, dict[str, Any]]] = [
        (f"--{flag}", {"flags": {flag: text}}),
        (option.variable, {"environment": {option.variable: text}}),
        (f"{flag} in {file}", {"file": file}),
    ]
    for source, where in sources:
        with pytest.raises(ConfigError) as caught:
            load(**where)
        assert str(caught.value) == f"{source} is {text!r}; it must be {option.parser.allowed}"


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("port = 9000", "port", 9000),
        ("max_queue_delay_ms = 2.5", "max_queue_delay", 0.0025),
        ("max-queue-delay-ms = 2", "max_queue_delay", 0.002),
        ('max_queue_bytes = "1 MiB"', "max_queue_bytes", 1 << 20),
        ("priority-weights = [8, 1]", "priority_weights", (8, 1)),
        ('providers = ["tensorrt", "openvino"]', "providers", ("tensorrt", "openvino")),
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


def test_an_option_in_both_spellings_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("max-batch-size = 4\nmax_batch_size = 8\n")
    with pytest.raises(ConfigError, match="both max-batch-size and max_batch_size"):
        load_config(["m.onnx"], {}, {}, file)


def test_the_option_of_front_ends_is_an_error_that_names_its_replacement(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced = "is replaced by --processes, the number of whole server processes"
    for arguments in (["--front-ends", "2"], ["--front-ends=auto"], ["--front-ends"]):
        with pytest.raises(SystemExit) as ended:
            read_config(["m.onnx", *arguments])
        assert ended.value.code == 2
        assert f"--front-ends {replaced}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"^TENSORFERRY_FRONT_ENDS {replaced}"):
        load_config(["m.onnx"], {}, {"TENSORFERRY_FRONT_ENDS": "0"}, None)
    for key in ("front-ends", "front_ends"):
        file.write_text(f"{key} = 2\n")
        with pytest.raises(ConfigError, match=f"^front-ends in {file} {replaced}"):
            load(file=file)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("prot", "'prot'; did you mean port?"),
        ("max_batch", "'max_batch'; did you mean max-batch-size?"),
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


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("m.onnx", "m", "m.onnx"),
        ("/models/some.thing-2_b.onnx", "some.thing-2_b", "/models/some.thing-2_b.onnx"),
        ("without-suffix", "without-suffix", "without-suffix"),
        ("name=/models/m.onnx", "name", "/models/m.onnx"),
        ("name=a=b.onnx", "name", "a=b.onnx"),
        ("./a=b/m.onnx", "m", "./a=b/m.onnx"),
        ("0=m.onnx", "0", "m.onnx"),
        ("x" * 128 + "=m.onnx", "x" * 128, "m.onnx"),
    ],
)
def test_a_model_is_a_path_or_a_name_and_a_path(text: str, name: str, path: str) -> None:
    assert model_source(text) == ModelSource(name, Path(path))


@pytest.mark.parametrize(
    "text",
    [
        "=m.onnx",
        "a b=m.onnx",
        "-a=m.onnx",
        ".a=m.onnx",
        "a\n=m.onnx",
        "é=m.onnx",
        "x" * 129 + "=m.onnx",
        "my model.onnx",
        ".onnx",
        "..",
        "/",
    ],
)
def test_a_model_name_that_is_not_allowed_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="a name starts with a letter or digit") as caught:
        model_source(text)
    assert f"MODEL is {text!r}" in str(caught.value)


@pytest.mark.parametrize("text", ["", "name="])
def test_a_model_without_a_path_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be path\.onnx, name=path\.onnx or path\.py"):
        model_source(text)


def test_two_models_with_one_name_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"two models are named 'm'; rename one of them by name=path\.onnx"):
        load(models=["a/m.onnx", "n=n.onnx", "b/m.onnx"])


def test_no_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no MODEL was given"):
        load(models=[])


def test_the_models_of_the_file_are_used_if_the_command_line_has_none(file: Path) -> None:
    file.write_text('models = ["a.onnx", "b=c.onnx"]')
    assert [source.name for source in load(models=[], file=file).models] == ["a", "b"]
    assert [source.name for source in load(models=["x.onnx"], file=file).models] == ["x"]


@pytest.mark.parametrize("line", ['models = "a.onnx"', "models = [1]", "models = 3"])
def test_the_models_of_the_file_must_be_a_list_of_strings(line: str, file: Path) -> None:
    file.write_text(line)
    with pytest.raises(ConfigError, match=r"it must be a list of path\.onnx or name=path\.onnx"):
        load(models=[], file=file)


def test_ray_serve_refuses_the_options_of_ports_clients_and_outputs() -> None:
    """A replica has no port of its own, shares its clients with other replicas, and sends out only responses."""
    standalone = {option.field for option in OPTIONS if option.scope is OptionScope.STANDALONE}
    assert {
        "port",
        "tls_key",
        "auth_tokens",
        "client_rate",
        "drain_delay",
        "metrics_port",
        "otel",
    } <= standalone
    assert not {"device", "max_batch_size", "max_queue_size", "drain_seconds", "log_level"} & standalone


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
