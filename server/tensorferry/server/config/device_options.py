"""The options that say where models run, and how on a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tensorferry.server.config.option_types import Option, one_of, positive, size, switch
from tensorferry.server.config.server_config import ServerConfig


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda|cuda:\d{1,3}(,\d{1,3})*", text):
        raise ValueError
    kind, colon, listed = text.partition(":")
    # "00" is the device 0 once more.
    indices = [int(index) for index in listed.split(",") if index]
    if len(set(indices)) < len(indices):
        raise ValueError
    return f"{kind}{colon}{','.join(map(str, indices))}"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(name and name == name.strip() for name in names):
        raise ValueError
    return names


DEVICE_OPTIONS: tuple[Option, ...] = (
    Option(
        "device",
        "device",
        _device,
        "auto, cpu, cuda or cuda:N, or for an instance on each of several cuda:N,M,..., each number once",
        "where the models run; auto takes CUDA if it can; cuda:0,1 has an instance of each model on both",
        form="auto|cpu|cuda|cuda:N,...",
    ),
    Option(
        "cuda-memory-bytes",
        "cuda_memory_bytes",
        size,
        "a number of bytes of at least 1, or one with KiB, MiB or GiB",
        "most bytes that ONNX Runtime's arena takes of a GPU's memory, for each instance of a model",
    ),
    Option(
        "cuda-memory-growth",
        "cuda_memory_growth",
        one_of("doubling", "exact"),
        "doubling or exact",
        "how the arena grows: to the next power of two, which is asked for seldom, or by what is asked for",
    ),
    Option(
        "cudnn-search",
        "cudnn_search",
        one_of("exhaustive", "heuristic", "default"),
        "exhaustive, heuristic or default",
        "how cuDNN's algorithm is chosen for a convolution of a new shape: all are timed, it is guessed, or always the "
        "same is taken",
    ),
    switch(
        "tf32",
        "tf32",
        "whether GPUs may round FP32 to TF32, of 10 bits, in matrix products and convolutions",
    ),
    switch(
        "fp16",
        "fp16",
        "convert each model to FP16 when it is loaded, and check its outputs against FP32; clients notice nothing",
    ),
    Option(
        "fp16-tolerance",
        "fp16_tolerance",
        positive,
        "a number above 0",
        "how far an output in FP16 may be off, relative to its greatest magnitude; beyond it the model is refused",
    ),
    Option(
        "fp16-except",
        "fp16_except",
        _names,
        "operators or names of nodes, with commas between",
        "what stays in FP32, such as Softmax,/encoder/norm/Pow; may be given several times",
        separator=",",
        form="NAME,...",
    ),
)

# Those that change nothing where no model runs on a GPU.
_OF_CUDA = ("cuda-memory-bytes", "cuda-memory-growth", "cudnn-search", "tf32")


# Those that change nothing where no model is converted to FP16.
_OF_FP16 = ("fp16-tolerance", "fp16-except")


def cuda_flags(config: ServerConfig) -> Sequence[str]:
    """The options of GPUs that are not left at their defaults, each with its value: "tf32 is false"."""
    return _given(config, _OF_CUDA)


def fp16_flags(config: ServerConfig) -> Sequence[str]:
    """The same of those that say how models are converted to FP16."""
    return _given(config, _OF_FP16)


def _given(config: ServerConfig, flags: Sequence[str]) -> Sequence[str]:
    defaults = ServerConfig(())
    return [
        f"{option.flag} is {_shown(getattr(config, option.field))}"
        for option in DEVICE_OPTIONS
        if option.flag in flags and getattr(config, option.field) != getattr(defaults, option.field)
    ]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return repr(",".join(value))
    return str(value).lower() if isinstance(value, bool) else repr(value)
