"""Requests made of arrays, with the checks that a client's message gets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.batcher import Tensor
from tensorferry.protos.tensors import from_numbers
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.inference.requests.codec import (
    DecodedRequest,
    ResponseSpec,
    all_outputs,
    check_input_names,
    row_count,
)
from tensorferry.server.inference.requests.input_contents import check_shape, rows_first
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.signature import TensorSpec
from tensorferry.server.wire.parameters import RequestParameters

Array = npt.NDArray[Any]

# The queue bounds the rows of a call.
_LIMITS = RequestLimits(rows=0)


def request_of_arrays(inputs: Mapping[str, npt.ArrayLike], model: Model, priority: int) -> DecodedRequest:
    """Return a request of these inputs, which asks for all outputs. InvalidRequestError if they do not fit the model.

    Tensors are copies, because the function may use its arrays again as soon as its call has ended, also where a batch
    still reads them. An array must have the input's datatype. Lists and numbers are converted.
    """
    check_input_names(inputs, model.name, model.signature)
    signature = model.signature.with_given_inputs(inputs)
    tensors = tuple([_tensor(inputs[spec.name], spec, model) for spec in signature.inputs])
    return DecodedRequest(
        signature,
        tensors,
        rows=row_count(tensors, model.name, signature, _LIMITS) if model.batched else 1,
        key=tuple([tensor.shape[1:] for tensor in tensors]),
        shared=signature.shared_inputs(batched=model.batched),
        nbytes=sum([_nbytes(tensor) for tensor in tensors]),
        parameters=RequestParameters(math.inf, priority, explain=False),
        response_spec=ResponseSpec(all_outputs(signature), typed=False, explain=False),
    )


def _tensor(value: npt.ArrayLike, spec: TensorSpec, model: Model) -> Tensor:
    what = f"inference input {spec.name!r} for model {model.name!r}"
    array = _strings(value, spec, what) if spec.datatype.name == "BYTES" else _numbers(value, spec, what)
    check_shape(array.shape, spec, model.name, model.batched)
    if array.dtype.hasobject:
        return rows_first(Tensor(array.dtype, array.shape, array.copy()), spec)
    return rows_first(Tensor(array.dtype, array.shape, array.tobytes()), spec)


def _numbers(value: npt.ArrayLike, spec: TensorSpec, what: str) -> Array:
    storage = spec.datatype.storage
    try:
        if isinstance(value, (list, tuple, bool, int, float)):
            return from_numbers(value, spec.datatype)
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{what} is of type {type(value).__name__}, which is no array of {spec.datatype.name}: {error}"
        ) from None
    if array.dtype == storage:
        return array
    if spec.datatype.name == "BF16" and array.dtype.name == "bfloat16":
        return array.view(storage)
    wanted = "ml_dtypes.bfloat16" if spec.datatype.name == "BF16" else repr(storage.name)
    raise InvalidRequestError(
        f"{what} has dtype {array.dtype}, but the model expects {spec.datatype.name}: convert it with .astype({wanted})"
    )


def _strings(value: npt.ArrayLike, spec: TensorSpec, what: str) -> Array:
    # Not an array of dtype S or U, which loses NULs at the end of a string.
    array = value if isinstance(value, np.ndarray) else np.asarray(value, object)
    if array.dtype.kind in "SUT":
        array = array.astype(object)
    if array.dtype != object:
        kind = bytes if spec.binary else str
        raise InvalidRequestError(
            f"{what} has dtype {array.dtype}, but the model expects {kind.__name__} elements: give an array of them"
        )
    try:
        return spec.elements(array)
    except UnicodeError as error:
        raise InvalidRequestError(f"{what} has an element that is not UTF-8 ({error})") from None
    except TypeError as error:
        raise InvalidRequestError(f"{what} has {error}") from None


def _nbytes(tensor: Tensor) -> int:
    if tensor.dtype.hasobject:
        return sum(map(len, tensor.data.flat))
    return math.prod(tensor.shape) * tensor.dtype.itemsize
