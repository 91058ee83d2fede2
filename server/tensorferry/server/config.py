"""Flags, environment and file → one frozen configuration, validated with the offending value."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.models import NAME


class ConfigError(Exception):
    """An option has a bad value: the message names the option, the value, and what is allowed."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model version to serve: its name, and the ONNX file.

    `config` is what the model's config.pbtxt says, as it stands there, None where there is none;
    `directory` is the model's in its repository, None for one that was named by its file.
    """

    name: str
    path: Path
    version: str = "1"
    config: ModelConfig | None = None
    directory: Path | None = None


class PadLengths(NamedTuple):
    """The name of the axis that is padded, and the lengths that it is padded to, ascending."""

    axis: str
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that the server is told. Times in seconds, sizes in bytes; see `OPTIONS`."""

    models: tuple[ModelSource, ...]
    model_repositories: tuple[Path, ...] = ()
    model_control: str = "none"
    load_models: tuple[str, ...] = ()
    repository_poll_seconds: float = 15.0
    exit_on_error: bool = True
    host: str = "127.0.0.1"
    port: int = 8001
    transport: str = "auto"
    device: str = "auto"
    max_batch_size: int = 32
    batching: str = "prove"
    pad_lengths: PadLengths | None = None
    pad_values: tuple[tuple[str, str], ...] = ()
    max_queue_delay: float = 0.0
    preferred_batch_sizes: tuple[int, ...] = ()
    priority_weights: tuple[int, ...] = (1,)
    default_priority: int = 0
    slo: float = 0.0
    max_queue_size: int = 4096
    max_queue_bytes: int = 1 << 30
    max_message_bytes: int = 64 << 20
    drain_seconds: float = 30.0
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    triton_status_codes: bool = False
    allow_shared_memory: bool = False
    trace_file: Path | None = None
    log_format: str = "text"
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: a flag, an environment variable and a key of the file by the same name.

    With a `separator` the flag may be given several times, and the file may have a list: their
    texts are one, with that between. The flag of a `switch` may stand alone, which means true.
    """

    flag: str
    field: str
    parse: Callable[[str], Any]
    allowed: str
    help: str
    separator: str = ""
    switch: bool = False

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "TENSORFERRY_" + self.flag.replace("-", "_").upper()

    def value(self, text: str, source: str) -> Any:
        """The value in a text; ConfigError names where it stood (`source`)."""
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(f"{source} is {text!r}; it must be {self.allowed}") from None


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise ValueError
        return value

    return parse


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def _positive(text: str) -> float:
    if not (value := _number(text)):
        raise ValueError
    return value


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+) ?(|KiB|MiB|GiB)", text.strip())
    if match is None or int(match[1]) < 1:
        raise ValueError
    return int(match[1]) << {"": 0, "KiB": 10, "MiB": 20, "GiB": 30}[match[2]]


def _message_size(text: str) -> int:
    value = _size(text)
    if value >= 1 << 31:
        raise ValueError
    return value


def _integers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.strip("[] ").split(","))
    if min(values) < 1:
        raise ValueError
    return values


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError
        return text.lower()

    return parse


def _switch(flag: str, field: str, help: str) -> Option:
    def parse(text: str) -> bool:
        return _one_of("true", "false")(text) == "true"

    return Option(flag, field, parse, "true or false", help, switch=True)


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda|cuda:\d{1,3}", text):
        raise ValueError
    return text


def _pad_lengths(text: str) -> PadLengths:
    axis, _, listed = text.rpartition("=")
    lengths = tuple(int(length) for length in listed.split(","))
    if not axis or lengths[0] < 1 or any(b <= a for a, b in pairwise(lengths)):
        raise ValueError
    return PadLengths(axis, lengths)


def _pad_values(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if any(not name or not equals for name, equals, _ in pairs) or len({pair[0] for pair in pairs}) < len(
        pairs
    ):
        raise ValueError
    return tuple((name, value) for name, _, value in pairs)


def _path(text: str) -> Path:
    if not text.strip():
        raise ValueError
    return Path(text)


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]+", text):
        raise ValueError
    return text


def _paths(text: str) -> tuple[Path, ...]:
    if not all(parts := text.split(os.pathsep)):
        raise ValueError
    return tuple(map(Path, parts))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if names != ("*",) and not all(map(NAME.fullmatch, names)):
        raise ValueError
    return names


OPTIONS: tuple[Option, ...] = (
    Option(
        "model-repository",
        "model_repositories",
        _paths,
        f"directories, with {os.pathsep!r} between",
        "a directory of models in Triton's layout, NAME/VERSION/model.onnx; may be given several times",
        separator=os.pathsep,
    ),
    Option(
        "model-control",
        "model_control",
        _one_of("none", "poll", "explicit"),
        "none, poll or explicit",
        "none serves the repository as it is at the start; poll follows its changes; explicit loads and unloads "
        "models when a client says so",
    ),
    Option(
        "load-model",
        "load_models",
        _names,
        "names of models, with commas between, or *",
        "with --model-control explicit: a model of the repository that is loaded at the start, * for all; may be "
        "given several times",
        separator=",",
    ),
    Option(
        "repository-poll-seconds",
        "repository_poll_seconds",
        _positive,
        "a number of seconds above 0",
        "with --model-control poll: how often the repository is looked at",
    ),
    Option(
        "exit-on-error",
        "exit_on_error",
        lambda text: _one_of("true", "false")(text) == "true",
        "true or false",
        "whether a model of the repository that cannot be loaded at the start ends the server",
    ),
    Option("host", "host", _host, "an address or host name", "address to listen on; 0.0.0.0 or :: for all"),
    Option(
        "port",
        "port",
        _integer(0, 65535),
        "an integer from 0 to 65535",
        "port; 0 picks a free one and prints it",
    ),
    Option(
        "transport",
        "transport",
        _one_of("auto", "lane", "threaded"),
        "auto, lane or threaded",
        "how ModelInfer and ModelStreamInfer are served; auto takes the fast lane if it works with this grpcio",
    ),
    Option(
        "device",
        "device",
        _device,
        "auto, cpu, cuda or cuda:N",
        "where the models run; auto takes CUDA if it can",
    ),
    Option(
        "max-batch-size",
        "max_batch_size",
        _integer(0, 1 << 20),
        "an integer from 0 to 1048576",
        "most rows in a batch; 0 runs each request alone",
    ),
    Option(
        "batching",
        "batching",
        _one_of("prove", "trust"),
        "prove or trust",
        "prove at load that rows of a batch do not affect each other, or trust that they do not",
    ),
    Option(
        "pad-lengths",
        "pad_lengths",
        _pad_lengths,
        "the name of an axis and ascending lengths of at least 1, such as sequence=16,32,64",
        "AXIS=N,N,...: pad inputs to these lengths along an axis that varies, so that different lengths share a batch",
    ),
    Option(
        "pad-values",
        "pad_values",
        _pad_values,
        "a value for each input that is padded, such as input_ids=0,attention_mask=0",
        "INPUT=VALUE,...: what each input with that axis is padded with",
    ),
    Option(
        "max-queue-delay-ms",
        "max_queue_delay",
        lambda text: _number(text) / 1e3,
        "a number of milliseconds of at least 0",
        "how long a request may wait, from its arrival, for its batch to fill; 0: only while the device is busy",
    ),
    Option(
        "preferred-batch-sizes",
        "preferred_batch_sizes",
        _integers,
        "integers of at least 1, with commas between",
        "sizes at which a batch leaves before its window is over, as in Triton; rarely of use",
    ),
    Option(
        "priority-weights",
        "priority_weights",
        _integers,
        "integers of at least 1, with commas between",
        "classes of requests, the highest first, and how they share the rows when all wait: 8,1 gives two",
    ),
    Option(
        "default-priority",
        "default_priority",
        _integer(0),
        "an integer of at least 0",
        "class of requests that name none, 1 the highest; 0: the lowest",
    ),
    Option(
        "slo-ms",
        "slo",
        lambda text: _number(text) / 1e3,
        "a number of milliseconds of at least 0",
        "deadline of every request from its arrival, if it has no earlier one; 0: none",
    ),
    Option(
        "max-queue-size",
        "max_queue_size",
        _integer(1),
        "an integer of at least 1",
        "most rows waiting, for each model; beyond it requests are refused",
    ),
    Option(
        "max-queue-bytes",
        "max_queue_bytes",
        _size,
        "a number of bytes of at least 1, or one with KiB, MiB or GiB",
        "most bytes of requests accepted and not answered, for each model",
    ),
    Option(
        "max-message-bytes",
        "max_message_bytes",
        _message_size,
        "a number of bytes from 1 to 2147483647, or one with KiB, MiB or GiB",
        "largest message received or sent",
    ),
    Option(
        "drain-seconds",
        "drain_seconds",
        _number,
        "a number of seconds of at least 0",
        "how long accepted requests may take to finish after SIGTERM or Ctrl-C",
    ),
    _switch(
        "triton-status-codes",
        "triton_status_codes",
        "UNAVAILABLE, as Triton has it, where a request meets a full queue or its deadline passes",
    ),
    _switch(
        "allow-shared-memory",
        "allow_shared_memory",
        "let clients register any POSIX shared memory that this process may open, and have tensors there",
    ),
    Option(
        "metrics-port",
        "metrics_port",
        _integer(0, 65535),
        "an integer from 0 to 65535",
        "port that serves metrics for Prometheus over HTTP, at /metrics; 0 picks a free one and prints it; none: no metrics",
    ),
    Option(
        "metrics-host",
        "metrics_host",
        _host,
        "an address or host name",
        "address that serves the metrics, which have no password; 0.0.0.0 or :: for all",
    ),
    Option(
        "trace-file",
        "trace_file",
        _path,
        "a path",
        "where traces of requests go, once clients switch them on by TraceSetting",
    ),
    Option(
        "log-format", "log_format", _one_of("text", "json"), "text or json", "form of the log lines on stderr"
    ),
    Option(
        "log-level",
        "log_level",
        _one_of("debug", "info", "warning", "error"),
        "debug, info, warning or error",
        "least level that is logged",
    ),
)


def model_source(text: str) -> ModelSource:
    """The model in `path.onnx` or `name=path.onnx`; ConfigError when the name is not allowed."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        name, path = Path(text).name.removesuffix(".onnx"), text
    if not path:
        raise ConfigError(f"MODEL is {text!r}; it must be path.onnx or name=path.onnx")
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"MODEL is {text!r}, whose name is {name!r}; a name starts with a letter or digit, goes on with these and "
            "'.', '_', '-', and has at most 128 characters: give it one by name=path.onnx"
        )
    return ModelSource(name, Path(path))


def load_config(
    models: Sequence[str], flags: Mapping[str, str | None], environment: Mapping[str, str], file: Path | None
) -> ServerConfig:
    """The configuration; a flag counts before the environment, that before the file.

    `models` are the command line's; if there are none, the file's list `models` is taken.
    ConfigError for the first bad value.
    """
    in_file = _read(file) if file is not None else {}
    listed = in_file.pop("models", [])
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise ConfigError(f"models in {file} is {listed!r}; it must be a list of path.onnx or name=path.onnx")
    fields: dict[str, Any] = {}
    for option in OPTIONS:
        key = option.flag.replace("-", "_")
        from_file = [in_file.pop(name) for name in (option.flag, key) if name in in_file]
        flag = flags.get(option.flag)
        if flag is not None:
            fields[option.field] = option.value(flag, f"--{option.flag}")
        elif option.variable in environment:
            fields[option.field] = option.value(environment[option.variable], option.variable)
        elif from_file:
            fields[option.field] = option.value(_text(from_file[0], option), f"{option.flag} in {file}")
    if in_file:
        allowed = ", ".join(["models", *(option.flag for option in OPTIONS)])
        raise ConfigError(f"{file} has the unknown key {next(iter(in_file))!r}; known are {allowed}")
    sources = tuple(model_source(text) for text in models or listed)
    if not sources and not fields.get("model_repositories"):
        raise ConfigError(
            "no MODEL was given; name at least one: tensorferry serve path.onnx, or --model-repository DIR"
        )
    config = ServerConfig(sources, **fields)
    if config.default_priority > len(config.priority_weights):
        raise ConfigError(
            f"default-priority is {config.default_priority}, but priority-weights has {len(config.priority_weights)} "
            "classes: choose one of these"
        )
    for size in config.preferred_batch_sizes:
        if size > config.max_batch_size:
            raise ConfigError(
                f"preferred-batch-sizes has {size}, but max-batch-size is {config.max_batch_size}: choose sizes up to that"
            )
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are named {name!r}; give one another name by name=path.onnx")
    _check_control(config)
    if config.pad_lengths is None and config.pad_values:
        raise ConfigError(
            "pad-values are given without pad-lengths; say what is padded: --pad-lengths AXIS=16,32,64"
        )
    if config.pad_lengths is not None and config.max_batch_size == 0:
        raise ConfigError(
            "pad-lengths are given, but max-batch-size is 0: nothing shares a batch; leave out one of them"
        )
    return config


def _check_control(config: ServerConfig) -> None:
    if config.model_control != "none" and not config.model_repositories:
        raise ConfigError(
            f"model-control is {config.model_control!r}, but there is no model repository to control: name one by "
            "--model-repository"
        )
    if config.load_models and config.model_control != "explicit":
        raise ConfigError(
            f"load-model is {','.join(config.load_models)!r}, but model-control is {config.model_control!r}, by which "
            "every model of the repository is loaded; leave it out, or give --model-control explicit"
        )


def _text(value: Any, option: Option) -> str:
    if option.separator and isinstance(value, list):
        return option.separator.join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--config is {str(file)!r}; it must be a TOML file that can be read ({error})"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config is {str(file)!r}, which is not valid TOML: {error}") from None
