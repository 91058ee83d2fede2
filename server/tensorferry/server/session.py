"""ONNX Runtime: a model on a device."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.instances import Machine
from tensorferry.server.session_options import ARENA_SHRINKAGE, DEVICE_ALLOCATOR, SessionOptions
from tensorferry.server.signature import Signature, TensorSpec, signature_of

_log = logging.getLogger("tensorferry.server")

Array = npt.NDArray[Any]

_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16

_GRAPH_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


def cuda_device_count() -> int:
    """The CUDA devices that the driver has; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def choose_device(wanted: str) -> str:
    """The device to run on, `cpu` or `cuda:N`, for `auto`, `cpu`, `cuda` or `cuda:N`.

    `auto` falls back to the CPU with one line in the log; StartError when a CUDA device was
    asked for and is not there.
    """
    if wanted == "cpu":
        return "cpu"
    missing = _why_no_cuda(int(wanted.partition(":")[2] or 0))
    if missing is None:
        # Finds the CUDA and cuDNN libraries that are installed as Python packages; since 1.21.
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        return wanted if wanted.startswith("cuda:") else "cuda:0"
    if wanted == "auto":
        _log.info("running on the CPU: %s", missing)
        return "cpu"
    raise StartError(
        f"--device is {wanted!r}, but {missing}; use --device cpu, or auto to fall back by itself"
    )


def machine_of(wanted: str, device: str) -> Machine:
    """Where a configuration may put a model, where --device is `wanted`, and came to `device`."""
    if wanted == "cpu":
        return Machine(device, (), "--device is cpu")
    missing = _why_no_cuda(int(wanted.partition(":")[2] or 0))
    if missing is not None:
        return Machine(device, (), missing)
    only = wanted.partition(":")[2]
    return Machine(device, (int(only),) if only else tuple(range(cuda_device_count())))


def _why_no_cuda(index: int) -> str | None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "the installed onnxruntime has no CUDA provider (pip install 'tensorferry[gpu]' has it)"
    count = cuda_device_count()
    if index >= count:
        return f"there is no CUDA device {index} (the driver reports {count})"
    return None


class Session:
    """A model loaded on a device. `run` may be called from several threads at once.

    StartError when the file cannot be loaded, or the device or a provider not be used.
    """

    def __init__(
        self,
        path: Path,
        device: str = "cpu",
        settings: SessionOptions = SessionOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self.path = path
        self.device = device
        if not path.is_file():
            raise StartError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        providers = _providers(device, settings)
        for name, _ in providers:
            if name not in onnxruntime.get_available_providers():
                raise StartError(
                    f"{path}: its configuration asks for {name}, which the installed onnxruntime does not have; it has "
                    f"{', '.join(onnxruntime.get_available_providers())}"
                )
        try:
            self._session = onnxruntime.InferenceSession(str(path), _options(settings), providers=providers)
        except Exception as error:
            raise StartError(f"{path}: ONNX Runtime cannot load it: {_reason(error)}") from error
        for name, _ in providers:
            if name not in self._session.get_providers():
                what = device if name == "CUDAExecutionProvider" else name
                raise StartError(
                    f"{path}: ONNX Runtime could not use {what}; its log has the reason. Use --device cpu"
                )
        # A run that fails is run again in halves and then reported once, by us.
        self._run_options = onnxruntime.RunOptions()
        self._run_options.log_severity_level = 4
        if settings.arena_shrinkage:
            self._run_options.add_run_config_entry(ARENA_SHRINKAGE, settings.arena_shrinkage)
        try:
            self.signature: Signature = signature_of(self._session.get_inputs(), self._session.get_outputs())
        except StartError as error:
            raise StartError(f"{path}: {error}") from None
        self._outputs = [spec.name for spec in self.signature.outputs]
        kinds = {spec.datatype.name for spec in self.signature.inputs + self.signature.outputs}
        # IO binding has no strings, and a plain run no bfloat16. On the CPU a plain run takes numpy's
        # arrays as they are, and costs a tenth of what a binding does.
        self._plain = "BYTES" in kinds or (device == "cpu" and "BF16" not in kinds)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Runs the model once; arrays in `storage` form (see `tensors`), BYTES as `str` objects.

        ModelFailedError when ONNX Runtime does not carry it out, with its own reason as cause.
        """
        try:
            return self._run(inputs)
        except Exception as error:
            raise ModelFailedError(f"the model failed on this request: {_run_reason(error)}") from error

    def end_runs(self) -> None:
        """Has whatever runs now, and is run from now on, fail at the next of the model's nodes."""
        self._run_options.terminate = True

    def allow_runs(self) -> None:
        """Runs are carried out again."""
        self._run_options.terminate = False

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        signature = self.signature
        if self._plain:
            outputs = self._session.run(self._outputs, inputs, self._run_options)
            return dict(zip(self._outputs, outputs, strict=True))
        binding = self._session.io_binding()
        for spec in signature.inputs:
            binding.bind_ortvalue_input(spec.name, _to_ort(inputs[spec.name], spec))
        for spec in signature.outputs:
            binding.bind_output(spec.name, "cpu")
        self._session.run_with_iobinding(binding, self._run_options)
        values = binding.get_outputs()
        return {
            spec.name: _to_array(value, spec) for spec, value in zip(signature.outputs, values, strict=True)
        }


def _options(settings: SessionOptions) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    # Spinning workers take the cores that the transport needs while no batch runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    options.graph_optimization_level = _GRAPH_LEVELS[settings.graph]
    # By default ONNX Runtime makes a thread for each core of the machine, and binds it there,
    # even where the process may use only some of them.
    allowed = len(os.sched_getaffinity(0))
    if settings.intra_op_threads:
        options.intra_op_num_threads = settings.intra_op_threads
    elif allowed < (os.cpu_count() or allowed):
        options.intra_op_num_threads = allowed
    if settings.inter_op_threads:
        options.inter_op_num_threads = settings.inter_op_threads
    if settings.parallel:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = settings.memory_arena
    options.enable_mem_pattern = settings.memory_pattern
    if settings.device_allocator:
        options.add_session_config_entry(DEVICE_ALLOCATOR, settings.device_allocator)
    return options


def _providers(device: str, settings: SessionOptions) -> list[tuple[str, dict[str, Any]]]:
    """The execution providers, the first preferred; the CPU's takes what the others cannot."""
    cpu: list[tuple[str, dict[str, Any]]] = [("CPUExecutionProvider", {})]
    if device == "cpu":
        return [(provider.name, dict(provider.options)) for provider in settings.cpu] + cpu
    here = {"device_id": int(device.partition(":")[2])}
    gpu = [(provider.name, {**dict(provider.options), **here}) for provider in settings.gpu]
    return [*gpu, ("CUDAExecutionProvider", {**dict(settings.cuda), **here}), *cpu]


def _to_ort(array: Array, spec: TensorSpec) -> Any:
    if spec.datatype.name == "BF16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _to_array(value: Any, spec: TensorSpec) -> Array:
    if spec.datatype.name != "BF16":
        return np.asarray(value.numpy())
    # ONNX Runtime gives no numpy array of bfloat16: its bits are copied out.
    shape = value.shape()
    bits = ctypes.string_at(value.data_ptr(), math.prod(shape) * spec.datatype.size)
    return np.frombuffer(bits, spec.datatype.storage).reshape(shape)


def _reason(error: Exception) -> str:
    """ONNX Runtime's message on one line, without the code in front."""
    return " ".join(re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error)).split())


def _run_reason(error: Exception) -> str:
    """What a client may read of a failed run: the node and the reason, never a place in the source."""
    text = _reason(error).removeprefix("Error in execution: ")
    node = re.search(r"while running (\S+) node", text)
    reason = text.rpartition("Status Message: ")[2]
    if re.search(r"\.(cc|cu|cpp|h|hpp)\b|/", reason):
        reason = "the server's log has the reason"
    return f"{node[1]} node: {reason}" if node else reason
