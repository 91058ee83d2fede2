"""Execution providers of a session, with their options."""

from __future__ import annotations

from typing import Any

from tensorferry.server.runtime.ort_options import OrtOptions

CUDA = "CUDAExecutionProvider"

Providers = list[tuple[str, dict[str, Any]]]


def providers_of(device: str, settings: OrtOptions) -> Providers:
    """Return the execution providers in order of preference. The CPU's comes last and runs what the others cannot."""
    cpu: Providers = [("CPUExecutionProvider", {})]
    if device == "cpu":
        return [(provider.name, dict(provider.options)) for provider in settings.cpu] + cpu
    here = {"device_id": int(device.partition(":")[2])}
    gpu = [(provider.name, {**dict(provider.options), **here}) for provider in settings.gpu]
    return [*gpu, (CUDA, {**dict(settings.cuda), **here}), *cpu]


def capturing(providers: Providers) -> Providers:
    """Return the same providers with CUDA graphs enabled."""
    return [
        (name, {**options, "enable_cuda_graph": "1"} if name == CUDA else options)
        for name, options in providers
    ]
