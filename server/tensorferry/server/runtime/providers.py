"""ONNX Runtime's execution providers of a session, with their options."""

from __future__ import annotations

from typing import Any

from tensorferry.server.runtime.ort_options import OrtOptions

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"

Providers = list[tuple[str, dict[str, Any]]]


def providers_of(device: str, settings: OrtOptions) -> Providers:
    """The execution providers, the first preferred; the CPU's takes what the others cannot."""
    cpu: Providers = [("CPUExecutionProvider", {})]
    if device == "cpu":
        return [(provider.name, dict(provider.options)) for provider in settings.cpu] + cpu
    here = {"device_id": int(device.partition(":")[2])}
    gpu = [(provider.name, {**dict(provider.options), **here}) for provider in settings.gpu]
    return [*gpu, (CUDA, {**dict(settings.cuda), **here}), *cpu]


def capturing(providers: Providers) -> Providers:
    """The same, with the CUDA provider's graphs."""
    return [
        (name, {**options, "enable_cuda_graph": "1"} if name == CUDA else options)
        for name, options in providers
    ]
