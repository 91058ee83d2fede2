"""What models of Triton's Python backend import as `triton_python_backend_utils`.

It has the common part of that module, as the documentation of the Python backend describes it (python_backend, README.md).
Names that are not here are refused when a model is loaded.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.serving import infer, submit

Array = npt.NDArray[Any]

_log = logging.getLogger("tensorferry.model")

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_TYPES: Mapping[str, Any] = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}


class TritonModelException(Exception):
    """An error of a model; raised in `execute` it is for all requests of the batch."""


class TritonError:
    """The error of one response."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        """Return the text."""
        return self._message

    def code(self) -> int:
        """Return the code, one of the constants of this class."""
        return self._code


class Tensor:
    """A named array in the memory of the host."""

    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, np.asarray(array)
        if self._array.dtype.kind in "SU":
            self._array = self._array.astype(np.object_)

    def name(self) -> str:
        """Return the name."""
        return self._name

    def as_numpy(self) -> Array:
        """Return the array."""
        return self._array

    def shape(self) -> Sequence[int]:
        """Return the shape."""
        return self._array.shape

    def triton_dtype(self) -> str:
        """Return the datatype as a configuration names it."""
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        """Return true: tensors are in the memory of the host."""
        return True

    def to_dlpack(self) -> Any:
        """Return a capsule of the array, for frameworks."""
        return self._array.__dlpack__()

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        """Return a tensor of a framework's tensor, which is copied."""
        return cls(name, np.array(np.from_dlpack(tensor)))


class InferenceResponse:
    """The outputs of one request, or its error."""

    def __init__(self, output_tensors: Iterable[Tensor] = (), error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> Sequence[Tensor]:
        """Return the outputs."""
        return self._tensors

    def has_error(self) -> bool:
        """Return whether the request failed."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error; None if there is none."""
        return self._error


class InferenceRequest:
    """A request of a client; made by a model, a request to another model (`exec`)."""

    def __init__(
        self,
        *,
        inputs: Sequence[Tensor],
        requested_output_names: Sequence[str],
        model_name: str | bytes = "",
        model_version: int = -1,
        request_id: str = "",
        response_sender: InferenceResponseSender | None = None,
        timeout: int = 0,
        **_: Any,
    ) -> None:
        self._inputs, self._outputs = list(inputs), list(requested_output_names)
        # A name that comes from a tensor is bytes.
        self._model = model_name.decode() if isinstance(model_name, bytes) else model_name
        self._version, self._id = model_version, request_id
        self._sender, self._timeout = response_sender, timeout

    def inputs(self) -> Sequence[Tensor]:
        """Return the inputs."""
        return self._inputs

    def requested_output_names(self) -> Sequence[str]:
        """Return the names of the outputs."""
        return self._outputs

    def request_id(self) -> str:
        """Return the id; "" if the batch has several."""
        return self._id

    def model_name(self) -> str:
        """Return the model that the request is for."""
        return self._model

    def timeout(self) -> int:
        """Return the timeout in microseconds, 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """Return no parameters: "{}"."""
        return "{}"

    def is_cancelled(self) -> bool:
        """Return whether nobody reads the responses of a decoupled model any more."""
        return self._sender is not None and self._sender.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        """Return what sends the responses of a decoupled model."""
        if self._sender is None:
            raise TritonModelException(
                "get_response_sender is for decoupled models: set model_transaction_policy { decoupled: true }"
            )
        return self._sender

    def exec(self, decoupled: bool = False) -> InferenceResponse:
        """Run the request on another model, and wait for its response."""
        return _response(
            lambda: infer(self._model, self._arrays(decoupled), **self._options()), self._outputs
        )

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse:
        """Run the request on another model, and await its response."""
        future = submit(self._model, self._arrays(decoupled), **self._options())
        try:
            outputs = await asyncio.wrap_future(future)
        except Exception as error:
            return InferenceResponse(error=TritonError(str(error)))
        return _response(lambda: outputs, self._outputs)

    def _arrays(self, decoupled: bool) -> dict[str, Array]:
        if decoupled:
            raise TritonModelException("a model cannot call a decoupled model; leave out decoupled=True")
        return {tensor.name(): tensor.as_numpy() for tensor in self._inputs}

    def _options(self) -> dict[str, Any]:
        version = str(self._version) if self._version > 0 else ""
        return {"version": version, "timeout": self._timeout / 1e6 if self._timeout else None}


class InferenceResponseSender:
    """Sends the responses of a decoupled model; made by the server."""

    def __init__(
        self, send: Callable[[InferenceResponse | None, bool], None], cancelled: Callable[[], bool]
    ) -> None:
        self._send, self._cancelled = send, cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, and with the flag FINAL end the request. Waits while the client does not read."""
        self._send(response, bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL))

    def is_cancelled(self) -> bool:
        """Return whether nobody reads the responses any more."""
        return self._cancelled()


class Logger:
    """Writes to the server's log."""

    @staticmethod
    def log(message: str, level: int = 0) -> None:
        """Write a line."""
        _log.log((logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)[min(level, 3)], "%s", message)

    log_info = staticmethod(lambda message: _log.info("%s", message))
    log_warn = staticmethod(lambda message: _log.warning("%s", message))
    log_error = staticmethod(lambda message: _log.error("%s", message))
    log_verbose = staticmethod(lambda message: _log.debug("%s", message))


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input; None if the request has none of this name."""
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    """Return an output; None if the response has none of this name."""
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any] | str, name: str) -> Any:
    """Return what a configuration says of an input; None if it has none of this name."""
    return _described(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any] | str, name: str) -> Any:
    """Return what a configuration says of an output; None if it has none of this name."""
    return _described(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether a request of the model may have several responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled"))


def triton_string_to_numpy(name: str) -> Any:
    """Return numpy's type of a configuration's datatype."""
    if name not in _TYPES:
        raise TritonModelException(f"{name!r} has no type of numpy; it must be one of {', '.join(_TYPES)}")
    return _TYPES[name]


def numpy_to_triton_type(dtype: Any) -> str:
    """Return the configuration's datatype of numpy's type."""
    kind = np.dtype(dtype)
    return next((name for name, each in _TYPES.items() if np.dtype(each) == kind), "TYPE_STRING")


def _described(model_config: Mapping[str, Any] | str, kind: str, name: str) -> Any:
    config = json.loads(model_config) if isinstance(model_config, str) else model_config
    return next((tensor for tensor in config.get(kind, ()) if tensor["name"] == name), None)


def _response(outputs: Callable[[], Mapping[str, Any]], names: Sequence[str]) -> InferenceResponse:
    try:
        found = outputs()
        return InferenceResponse([Tensor(name, found[name]) for name in names or found])
    except Exception as error:
        return InferenceResponse(error=TritonError(str(error)))
