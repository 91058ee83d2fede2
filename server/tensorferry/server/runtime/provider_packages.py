"""Execution providers of packages of their own, such as onnxruntime-ep-openvino: libraries that ONNX Runtime loads.

The functions that such a package has are those that ONNX Runtime asks of it:
https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

from tensorferry.server.config.option_groups.devices import PROVIDER_PACKAGE
from tensorferry.server.errors import StartError
from tensorferry.server.runtime.ort import onnxruntime, ort_message

# ONNX Runtime refuses a library that is registered twice.
_registering = threading.Lock()


def is_package(provider: str) -> bool:
    """Return whether this names a package with providers, such as onnxruntime-ep-openvino."""
    return PROVIDER_PACKAGE.fullmatch(provider) is not None


def provider_names(package: str) -> tuple[str, ...]:
    """Return the names of a package's providers, after registering its library with ONNX Runtime.

    StartError if the package is not installed, or its library cannot be loaded.
    """
    with _registering:
        return _registered(package)


def provider_device(package: str, device: str) -> Any:
    """Return ONNX Runtime's record of the device on which a package's provider runs sessions of `device`.

    For cuda:N it is the GPU with that number. For the CPU it is the CPU, or the first device of a provider without one.
    StartError if there is none.
    """
    names = provider_names(package)
    found = [each for each in onnxruntime.get_ep_devices() if each.ep_name in names]
    kinds = onnxruntime.OrtHardwareDeviceType
    if device == "cpu":
        usable = [each for each in found if each.device.type == kinds.CPU] or found
        number = 0
    else:
        usable = [each for each in found if each.device.type == kinds.GPU]
        number = int(device.partition(":")[2])
    if number >= len(usable):
        has = ", ".join(sorted({each.device.type.name for each in found})) or "no device"
        raise StartError(f"{package} has no device for {device} on this machine; it has {has}")
    return usable[number]


@functools.cache
def _registered(package: str) -> tuple[str, ...]:
    register = getattr(onnxruntime, "register_execution_provider_library", None)
    if register is None:
        raise StartError(
            f"onnxruntime {onnxruntime.__version__} takes no providers of packages; {package} needs 1.23 or newer"
        )
    try:
        module = importlib.import_module(package.replace("-", "_"))
    except ImportError as error:
        raise StartError(
            f"the provider {package} is not installed ({error}): pip install {package}"
        ) from error
    try:
        register(package, module.get_library_path())
        return tuple(module.get_ep_names())
    except Exception as error:
        raise StartError(f"ONNX Runtime cannot use {package}: {ort_message(error)}") from error
