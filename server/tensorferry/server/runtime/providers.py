"""Execution providers and options of a session, in ONNX Runtime's form."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorferry.server.runtime.files.op_libraries import register
from tensorferry.server.runtime.ort import onnxruntime
from tensorferry.server.runtime.ort_options import DEVICE_ALLOCATOR, OrtOptions
from tensorferry.server.runtime.provider_packages import is_package, provider_device, provider_names
from tensorferry.server.system.cores import session_threads, usable_cores

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"

# Names and options. A package stands for its providers.
Providers = list[tuple[str, dict[str, Any]]]


def providers_of(device: str, settings: OrtOptions) -> Providers:
    """Return the execution providers in order of preference. The CPU's comes last and runs what the others cannot."""
    cpu: Providers = [(CPU, {})]
    if device == "cpu":
        return [(provider.name, dict(provider.options)) for provider in settings.cpu] + cpu
    number = int(device.partition(":")[2])
    # The first is the default of all providers. With the option, ONNX Runtime 1.26 and later warns at each session that no
    # plugin has the device, and then uses the built-in provider.
    device_option = {"device_id": number} if number else {}
    gpu = [
        (provider.name, {**dict(provider.options), **({} if is_package(provider.name) else device_option)})
        for provider in settings.gpu
    ]
    return [*gpu, (CUDA, {**dict(settings.cuda), **device_option}), *cpu]


def with_option(providers: Providers, names: Sequence[str], option: str, value: str) -> Providers:
    """Return the same providers. Those with these names have the option, too."""
    return [(name, {**given, option: value} if name in names else given) for name, given in providers]


def names_in_sessions(name: str) -> Sequence[str]:
    """Return what a session calls a provider, or those of a package. StartError if the package cannot be used."""
    return provider_names(name) if is_package(name) else (name,)


def open_session(path: Path, options: Any, providers: Providers, device: str) -> Any:
    """Create ONNX Runtime's session on a device. Without fallback, which would silently run the model on the CPU."""
    if not any(is_package(name) for name, _ in providers):
        return onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    for name, given in providers:
        texts = {key: str(value) for key, value in given.items()}
        if is_package(name):
            options.add_provider_for_devices([provider_device(name, device)], texts)
        elif name != CPU:
            options.add_provider(name, texts)
    return onnxruntime.InferenceSession(str(path), options, enable_fallback=0)


def session_options(settings: OrtOptions, device: str) -> onnxruntime.SessionOptions:
    """Return the options of a session on a device, in ONNX Runtime's form, with the libraries of operators registered.

    StartError if one cannot be loaded. `open_session` may add the providers, so the options are of one session.
    """
    options = onnxruntime.SessionOptions()
    # Idle workers that spin would take the cores that the transport needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # ONNX Runtime also raises its errors, and the server logs those.
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, settings.graph)
    # By default ONNX Runtime starts a thread for each core of the machine and binds it there, even if the process may
    # use only some of the cores.
    cores = usable_cores()
    if settings.intra_op_threads:
        options.intra_op_num_threads = settings.intra_op_threads
    elif settings.processes > 1:
        options.intra_op_num_threads = session_threads(cores, settings.processes)
    elif cores < (os.cpu_count() or cores):
        options.intra_op_num_threads = cores
    if settings.inter_op_threads:
        options.inter_op_num_threads = settings.inter_op_threads
    if settings.parallel:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = settings.memory_arena
    options.enable_mem_pattern = settings.memory_pattern
    if device != "cpu" or settings.cpu:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if settings.device_allocator:
        options.add_session_config_entry(DEVICE_ALLOCATOR, settings.device_allocator)
    register(options, settings.op_libraries)
    return options
