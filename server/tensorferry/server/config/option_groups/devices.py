"""Options of devices: where models run, GPU settings, FP16, and device failures."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import (
    Parser,
    integer,
    integer_or,
    parse_integers,
    path,
    positive_number,
    seconds,
    size,
    switch,
)

# Limited because each instance has its own copy of the weights.
MOST_INSTANCES = 64
# Limit for the threads of a session. ONNX Runtime's threads spin while they wait: starting 512 on two cores takes ten
# seconds and nearly blocks the machine.
MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))
_PROVIDERS = ("tensorrt", "openvino")
# Names of packages with execution providers of their own.
PROVIDER_PACKAGE = re.compile(r"onnxruntime-ep-[a-z0-9-]+")


def _parse_device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda|cuda:\d{1,3}(,\d{1,3})*", text):
        raise ValueError
    kind, colon, listed = text.partition(":")
    # As numbers, because "00" and "0" are the same device.
    indices = [int(index) for index in listed.split(",") if index]
    if len(set(indices)) < len(indices):
        raise ValueError
    return f"{kind}{colon}{','.join(map(str, indices))}"


def _parse_graph_sizes(text: str) -> tuple[int, ...] | None:
    if text.lower() in ("true", "false"):
        return () if text.lower() == "true" else None
    return parse_integers(text)


def _format_graph_sizes(value: tuple[int, ...] | None) -> str:
    return "false" if value is None else ",".join(map(str, value)) or "true"


def _parse_providers(text: str) -> tuple[str, ...]:
    providers = tuple(name.strip().lower() for name in text.split(","))
    known = all(name in _PROVIDERS or PROVIDER_PACKAGE.fullmatch(name) for name in providers)
    if not known or len(set(providers)) < len(providers):
        raise ValueError
    return providers


_device = Parser(
    _parse_device,
    "auto, cpu, cuda or cuda:N, or cuda:N,M,... with each number once",
    "device",
    "auto|cpu|cuda|cuda:N,...",
)
_graph_sizes = Parser(
    _parse_graph_sizes,
    "true, false, or integers of at least 1, separated by commas",
    "switch, or list of integers",
    "[true|false|N,N,...]",
    "rows",
    _format_graph_sizes,
    switch=True,
)
_providers = Parser(
    _parse_providers,
    "tensorrt, openvino, or installed packages such as onnxruntime-ep-openvino, separated by commas (CUDA or the CPU follows as "
    "--device says)",
    "list of tensorrt, openvino, or packages",
    "NAME,...",
)


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Options of devices."""

    device: str = option(
        "auto",
        _device,
        "where models run; cuda:N is one GPU, cuda:0,1 runs an instance of each model on both GPUs; auto uses CUDA if it "
        "is available",
        per_model=True,
    )
    # None is auto.
    instances: int | None = option(
        1,
        integer_or("auto", 1, MOST_INSTANCES, unit="sessions"),
        "sessions of a model on each device, which run batches at the same time, each with its own copy of the weights; auto: "
        "on a CPU, what carries the most rows, measured once while the server is idle; a lone request may then take longer",
        per_model=True,
    )
    threads: int = option(
        0,
        integer(0, MOST_THREADS, unit="threads"),
        "threads of ONNX Runtime in each session, which share the work of an operator; 0: one per core, divided by "
        "the server processes",
        per_model=True,
    )
    providers: tuple[str, ...] = option(
        (),
        _providers,
        "execution providers of ONNX Runtime that come before the device's own: tensorrt on a GPU, openvino on the CPU, which "
        "the installed onnxruntime must have; or an installed package with a provider, such as onnxruntime-ep-openvino, on either; "
        "can be given several times",
        separator=",",
        per_model=True,
    )
    cuda_memory_bytes: int | None = option(
        None,
        size(),
        "most GPU memory that ONNX Runtime's arena takes for each instance of a model; without it, there is no limit",
        scope=OptionScope.CUDA,
        per_model=True,
    )
    tf32: bool = option(
        True,
        switch,
        "allow GPUs to round FP32 to TF32 (10 bits of mantissa) in matrix products and convolutions",
        scope=OptionScope.CUDA,
        per_model=True,
    )
    fp16: bool = option(
        False,
        switch,
        "convert each model to FP16 when it is loaded, and compare its outputs with FP32; inputs and outputs keep their "
        "datatypes",
        per_model=True,
    )
    fp16_tolerance: float = option(
        0.02,
        positive_number,
        "with --fp16: largest error of an output, relative to its greatest magnitude; a model with a larger error is not "
        "loaded",
        per_model=True,
    )
    cuda_graphs: tuple[int, ...] | None = option(
        None,
        _graph_sizes,
        "run batches on a GPU as captured CUDA graphs of these sizes, padded up to the next size; true: 1, 2, 4, ... up "
        "to the largest batch; models that cannot be captured run without graphs",
        per_model=True,
    )
    tensorrt_cache: Path | None = option(
        None,
        path,
        "directory that keeps TensorRT engines, so that each is built only once; used by models whose configuration "
        "selects TensorRT",
    )
    run_timeout: float = option(
        600.0,
        seconds,
        "longest run of a model for one batch; a longer run is ended, and its requests fail; a model whose trial run at load is "
        "longer is refused; 0: no limit",
        flag="run-timeout-seconds",
        per_model=True,
    )
    exit_on_device_loss: bool = option(
        False,
        switch,
        "drain and exit with code 1 when no instance of a model works and only a restart can help; of "
        "several processes only that one exits, and is started again",
        scope=OptionScope.STANDALONE,
    )
