"""The options of `tensorferry serve`, and what their values look like as text."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

from tensorferry.server.config.device_options import DEVICE_OPTIONS
from tensorferry.server.config.leaving_options import LEAVING_OPTIONS
from tensorferry.server.config.limit_options import LIMIT_OPTIONS
from tensorferry.server.config.option_types import (
    MILLISECONDS,
    SECONDS,
    Option,
    integer,
    milliseconds,
    one_of,
    path,
    positive,
    seconds,
    size,
    switch,
)
from tensorferry.server.config.security_options import SECURITY_OPTIONS
from tensorferry.server.config.server_config import PadLengths
from tensorferry.server.config.telemetry_options import TELEMETRY_OPTIONS
from tensorferry.server.names import NAME


def _message_size(text: str) -> int:
    value = size(text)
    if value >= 1 << 31:
        raise ValueError
    return value


def _integers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.strip("[] ").split(","))
    if min(values) < 1:
        raise ValueError
    return values


def _graphs(text: str) -> tuple[int, ...] | None:
    if text.lower() in ("true", "false"):
        return () if text.lower() == "true" else None
    return _integers(text)


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


def _batching(text: str) -> str:
    policy = one_of("proved", "tested", "trust", "prove")(text)
    return "tested" if policy == "prove" else policy


def _port_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else integer(0, 65535)(text)


def _interval(text: str) -> float:
    positive(text)
    return seconds(text)


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
        form="DIR",
    ),
    Option(
        "model-control",
        "model_control",
        one_of("none", "poll", "explicit"),
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
        form="NAME|*",
    ),
    Option(
        "repository-poll-seconds",
        "repository_poll_seconds",
        _interval,
        f"{SECONDS}, but not 0",
        "with --model-control poll: how often the repository is looked at",
    ),
    switch(
        "exit-on-error",
        "exit_on_error",
        "whether a model of the repository that cannot be loaded at the start ends the server",
    ),
    Option("host", "host", _host, "an address or host name", "address to listen on; 0.0.0.0 or :: for all"),
    Option(
        "port",
        "port",
        integer(0, 65535),
        "an integer from 0 to 65535",
        "port; 0 picks a free one and prints it",
        form="PORT",
    ),
    Option(
        "transport",
        "transport",
        one_of("auto", "lane", "threaded"),
        "auto, lane or threaded",
        "how ModelInfer and ModelStreamInfer are served; auto takes the fast lane if it works with this grpcio",
    ),
    *SECURITY_OPTIONS,
    *DEVICE_OPTIONS,
    Option(
        "cuda-graphs",
        "cuda_graphs",
        _graphs,
        "true, false, or integers of at least 1, with commas between",
        "run batches on a GPU as captured CUDA graphs, of these sizes (true: 1, 2, 4, ... to the most), padded up to the "
        "next; models that cannot be captured run without",
        switch=True,
        form="[true|false|N,N,...]",
    ),
    Option(
        "tensorrt-cache",
        "tensorrt_cache",
        path,
        "a path",
        "folder that keeps the engines of models whose configuration has TensorRT, so that they are built once",
    ),
    Option(
        "max-batch-size",
        "max_batch_size",
        integer(0, 1 << 20),
        "an integer from 0 to 1048576",
        "most rows in a batch; 0 runs each request alone",
    ),
    Option(
        "batching",
        "batching",
        _batching,
        "proved, tested or trust",
        "which models are batched: those whose graph proves that rows of a batch do not affect each other, also those "
        "that only running shows it of (prove is the same), or all, unchecked",
        form="proved|tested|trust",
    ),
    Option(
        "pad-lengths",
        "pad_lengths",
        _pad_lengths,
        "the name of an axis and ascending lengths of at least 1, such as sequence=16,32,64",
        "pad inputs to these lengths along an axis that varies, so that different lengths share a batch",
        form="AXIS=N,N,...",
    ),
    Option(
        "pad-values",
        "pad_values",
        _pad_values,
        "a value for each input that is padded, such as input_ids=0,attention_mask=0",
        "what each input with that axis is padded with",
        form="INPUT=VALUE,...",
    ),
    Option(
        "max-queue-delay-ms",
        "max_queue_delay",
        milliseconds,
        MILLISECONDS,
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
        integer(0),
        "an integer of at least 0",
        "class of requests that name none, 1 the highest; 0: the lowest",
    ),
    Option(
        "slo-ms",
        "slo",
        milliseconds,
        MILLISECONDS,
        "deadline of every request from its arrival, if it has no earlier one; 0: none",
    ),
    Option(
        "max-queue-size",
        "max_queue_size",
        integer(1),
        "an integer of at least 1",
        "most rows waiting, for each model; beyond it requests are refused",
    ),
    Option(
        "max-queue-bytes",
        "max_queue_bytes",
        size,
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
    *LIMIT_OPTIONS,
    Option(
        "drain-seconds",
        "drain_seconds",
        seconds,
        SECONDS,
        "how long accepted requests may take to finish after SIGTERM or Ctrl-C",
    ),
    *LEAVING_OPTIONS,
    Option(
        "run-timeout-seconds",
        "run_timeout",
        seconds,
        SECONDS,
        "how long the model may run for one batch before it is ended and its requests fail; 0: for ever",
    ),
    switch(
        "exit-on-device-loss",
        "exit_on_device_loss",
        "drain and exit with code 1 when no instance of a model works and nothing but a restart can help",
    ),
    switch(
        "triton-status-codes",
        "triton_status_codes",
        "UNAVAILABLE, as Triton has it, where a request meets a full queue or its deadline passes",
    ),
    switch(
        "allow-shared-memory",
        "allow_shared_memory",
        "let clients register any POSIX shared memory that this process may open, and any device memory that another process "
        "exports, and have tensors there",
    ),
    switch(
        "allow-log-settings",
        "allow_log_settings",
        "let clients change what is logged, by LogSettings; which they can always read",
    ),
    Option(
        "metrics-port",
        "metrics_port",
        _port_or_none,
        "none or an integer from 0 to 65535",
        "port that serves metrics for Prometheus over HTTP, at /metrics, a status page at /, /healthz and /readyz; 0 picks a free one and prints it; none: nothing of these",
        form="PORT|none",
    ),
    Option(
        "metrics-host",
        "metrics_host",
        _host,
        "an address or host name",
        "address that serves the metrics and the status page, which have no password; 0.0.0.0 or :: for all",
    ),
    Option(
        "trace-file",
        "trace_file",
        path,
        "a path",
        "where traces of requests go, once clients switch them on by TraceSetting, which they cannot without it",
    ),
    *TELEMETRY_OPTIONS,
    Option(
        "log-format", "log_format", one_of("text", "json"), "text or json", "form of the log lines on stderr"
    ),
    Option(
        "log-level",
        "log_level",
        one_of("debug", "info", "warning", "error"),
        "debug, info, warning or error",
        "least level that is logged",
    ),
)
