"""What models of Triton's Python backend import as `triton_python_backend_utils`.

It has the common part of that module, as the documentation of the Python backend describes it (python_backend, README.md).
Names that are not here are refused when a model is loaded.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.protos import model_config_pb2 as pb
from tensorferry.protos.tensors import DATATYPES
from tensorferry.serving import submit
from tensorferry.serving.calls import outputs_within

Array = npt.NDArray[Any]

_log = logging.getLogger("tensorferry.model")

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

# numpy's type of each datatype, by its name in configurations. numpy has no BF16.
_TYPES = {
    f"TYPE_{'STRING' if name == 'BYTES' else name}": kind.storage.type
    for name, kind in DATATYPES.items()
    if name != "BF16"
}


class TritonModelException(Exception):
    """An error of a model; raised in `execute` it is for all requests of the batch."""


class TritonError:
    """The error of one response: its text, and its code, which is one of the constants."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named array in the memory of the host. `triton_dtype` is the number of its datatype in configurations."""

    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, np.asarray(array)
        if self._array.dtype.kind in "SUT":
            self._array = self._array.astype(np.object_)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self._array.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        """Return a tensor of a framework's tensor, or of the capsule that `to_dlpack` returns. It is copied."""
        source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        return cls(name, np.array(np.from_dlpack(source)))


class _Capsule:
    """A capsule of DLPack in the form that numpy takes."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule


class InferenceResponse:
    """The outputs of one request, or its error."""

    def __init__(self, output_tensors: Iterable[Tensor] = (), error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> Sequence[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class InferenceRequest:
    """A request of a client; made by a model, a request to another model (`exec`).

    The timeout is in microseconds, 0 for none; that of a client has none, because its deadline is the server's task.
    `preferred_memory` and `trace` have no effect. `exec` does not pass the parameters on.
    """

    def __init__(
        self,
        *,
        inputs: Sequence[Tensor],
        requested_output_names: Sequence[str],
        model_name: str | bytes = "",
        model_version: int = -1,
        request_id: str = "",
        parameters: Mapping[str, Any] | str | None = None,
        response_sender: InferenceResponseSender | None = None,
        timeout: int = 0,
        correlation_id: int | str = 0,
        flags: int = 0,
        preferred_memory: Any = None,
        trace: Any = None,
    ) -> None:
        if correlation_id or flags:
            raise TritonModelException(
                f"a model cannot send a request of a sequence; leave out correlation_id={correlation_id!r} and flags={flags}"
            )
        self._inputs, self._outputs = list(inputs), list(requested_output_names)
        # A name that comes from a tensor is bytes.
        self._model = model_name.decode() if isinstance(model_name, bytes) else model_name
        self._version, self._id = model_version, request_id
        self._sender, self._timeout = response_sender, timeout
        self._parameters = parameters if isinstance(parameters, str) else json.dumps(dict(parameters or {}))
        # Of the run that makes the request, for calls on threads of the model's own.
        self._context = copy_context()

    def inputs(self) -> Sequence[Tensor]:
        return self._inputs

    def requested_output_names(self) -> Sequence[str]:
        return self._outputs

    def request_id(self) -> str:
        return self._id

    def model_name(self) -> str:
        return self._model

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        return self._parameters

    def is_cancelled(self) -> bool:
        """Return whether nobody reads the responses of a decoupled model any more."""
        return self._sender is not None and self._sender.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            raise TritonModelException(
                "get_response_sender is for decoupled models: set model_transaction_policy { decoupled: true }"
            )
        return self._sender

    def exec(self, decoupled: bool = False) -> InferenceResponse:
        """Run the request on another model, and wait for its response."""
        try:
            timeout = self._timeout / 1e6 or None
            return self._response(outputs_within(self._submit(decoupled), self._model, timeout))
        except Exception as error:
            return InferenceResponse(error=TritonError(str(error)))

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse:
        """Run the request on another model, and await its response."""
        future = self._submit(decoupled)
        try:
            return self._response(await asyncio.wrap_future(future))
        except Exception as error:
            return InferenceResponse(error=TritonError(str(error)))

    def _submit(self, decoupled: bool) -> Future[dict[str, Any]]:
        if decoupled:
            raise TritonModelException("a model cannot call a decoupled model; leave out decoupled=True")
        arrays = {tensor.name(): tensor.as_numpy() for tensor in self._inputs}
        version = str(self._version) if self._version > 0 else ""
        call = partial(submit, self._model, arrays, version=version, timeout=self._timeout / 1e6 or None)
        try:
            return call()
        except RuntimeError:
            # No model runs on this thread. A copy, because several threads may use the request.
            return self._context.copy().run(call)

    def _response(self, outputs: dict[str, Any]) -> InferenceResponse:
        return InferenceResponse([Tensor(name, outputs[name]) for name in self._outputs or outputs])


class InferenceResponseSender:
    """Sends the responses of a decoupled model; made by the server."""

    def __init__(
        self, send: Callable[[InferenceResponse | None, bool], None], cancelled: Callable[[], bool]
    ) -> None:
        self._send = send
        # Returns whether nobody reads the responses any more.
        self.is_cancelled = cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, and with the flag FINAL end the request. Waits while the client does not read."""
        self._send(response, bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL))


class Logger:
    """Writes to the server's log."""

    INFO, WARNING, ERROR, VERBOSE = logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG

    @staticmethod
    def log(message: str, level: int = INFO) -> None:
        _log.log(level, "%s", message)

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


def numpy_to_triton_type(dtype: Any) -> int:
    """Return the number of the configuration's datatype of numpy's type."""
    kind = np.dtype(dtype)
    name = next((name for name, each in _TYPES.items() if np.dtype(each) == kind), "TYPE_STRING")
    return int(pb.DataType.Value(name))


def _described(model_config: Mapping[str, Any] | str, kind: str, name: str) -> Any:
    config = json.loads(model_config) if isinstance(model_config, str) else model_config
    return next((tensor for tensor in config.get(kind, ()) if tensor["name"] == name), None)
