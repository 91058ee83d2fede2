"""The options of `tensorferry serve`, and what their values look like as text."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tensorferry.server.config import ConfigError, PadLengths
from tensorferry.server.models import NAME


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
    Option(
        "run-timeout-seconds",
        "run_timeout",
        _number,
        "a number of seconds of at least 0",
        "how long the model may run for one batch before it is ended and its requests fail; 0: for ever",
    ),
    _switch(
        "exit-on-device-loss",
        "exit_on_device_loss",
        "drain and exit with code 1 when no instance of a model works and nothing but a restart can help",
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
