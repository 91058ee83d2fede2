"""The contents of a request's inputs: raw, typed, in shared memory, or texts in parameters.

Error messages keep Triton's wording, because clients recognise errors by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.batcher import Tensor
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import (
    Datatype,
    TensorError,
    datatype,
    decode_contents,
    decode_raw,
    element_count,
)
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.inference.shared_memory.regions import RegionLease, Span
from tensorferry.server.signature import TensorSpec
from tensorferry.server.wire.bounds import MAX_STRINGS
from tensorferry.server.wire.parameters import text_parameters

InputMessage = pb.ModelInferRequest.InferInputTensor

# The operator's limits on one request, where there are none. `wire.bounds` has the fixed ones.
DEFAULT_LIMITS = RequestLimits()

# By byte of a raw BOOL. ONNX Runtime miscounts bytes other than 0 and 1, and its outputs then have memory of others.
AS_BOOL = b"\0" + b"\1" * 255


def check_string_counts(request: pb.ModelInferRequest) -> None:
    """Raise InvalidRequestError for a tensor whose shape has more strings than allowed."""
    for tensor in request.inputs:
        if tensor.datatype != "BYTES":
            continue
        # The shape's count, because decoding checks later that the contents agree with it.
        count = max(element_count(tensor.shape), len(tensor.contents.bytes_contents))
        if count > MAX_STRINGS:
            raise InvalidRequestError(
                f"input {tensor.name[:64]!r} has {count} strings; this server takes at most {MAX_STRINGS} in a tensor: send "
                "less at once"
            )


def check_string_lengths(array: npt.NDArray[Any], name: str, limits: RequestLimits) -> None:
    """Raise InvalidRequestError for a string that is longer than allowed."""
    longest = max(map(len, array.flat), default=0)
    if longest > limits.string_bytes:
        raise InvalidRequestError(
            f"input {name!r} has a string of {longest} bytes; this server takes at most {limits.string_bytes}: send shorter "
            "ones, or start it with a larger --max-string-bytes"
        )


class InputContents(NamedTuple):
    """Where the contents of a request's inputs are, by name. An input in none of these has typed contents.

    `raws` is None if the request has no raw contents; otherwise it has every input that is not in shared memory.
    """

    spans: Mapping[str, Span]
    texts: Mapping[str, Sequence[bytes]]
    raws: Mapping[str, bytes] | None


def locate_contents(request: pb.ModelInferRequest, model: str, lease: RegionLease) -> InputContents:
    """Return where the contents are. InvalidRequestError if an input has them in two places.

    The lease gets the regions of inputs in shared memory.
    """
    spans: dict[str, Span] = {}
    texts: dict[str, Sequence[bytes]] = {}
    for tensor in request.inputs:
        if not tensor.parameters:
            continue
        if (span := lease.span(tensor)) is not None:
            spans[tensor.name] = span
        if (elements := text_parameters(tensor)) is not None:
            texts[tensor.name] = elements
    total = sum([span.nbytes for span in spans.values()])
    if total > lease.regions.max_bytes:
        raise InvalidRequestError(
            f"the request has {total} bytes in shared memory, which is more than the queue ever holds, "
            f"{lease.regions.max_bytes}: send less at once, or raise --max-queue-bytes"
        )
    if request.raw_input_contents or spans or texts:
        _check_places(request, model, spans, texts)
    return InputContents(spans, texts, _raw_contents(request, model, spans))


def _check_places(
    request: pb.ModelInferRequest, model: str, spans: Mapping[str, Span], texts: Mapping[str, Sequence[bytes]]
) -> None:
    for tensor in request.inputs:
        typed, text, in_memory = tensor.HasField("contents"), tensor.name in texts, tensor.name in spans
        if typed and in_memory:
            raise InvalidRequestError(
                f"unexpected 'content' provided when using shared memory for input tensor {tensor.name!r} for model "
                f"{model!r}: leave it out, or send the tensor"
            )
        if typed and request.raw_input_contents:
            raise InvalidRequestError(
                f"contents field must not be specified when using raw_input_contents for input {tensor.name!r} "
                f"for model {model!r}"
            )
        if text and (typed or in_memory or request.raw_input_contents):
            other = "contents" if typed else "shared memory" if in_memory else "raw_input_contents"
            raise InvalidRequestError(
                f"text parameters must not be specified when using {other} for input {tensor.name!r} for model {model!r}: "
                "leave out one of them"
            )


def _raw_contents(
    request: pb.ModelInferRequest, model: str, spans: Mapping[str, Span]
) -> Mapping[str, bytes] | None:
    raws = request.raw_input_contents
    if not raws:
        return None
    sent = [tensor for tensor in request.inputs if tensor.name not in spans] if spans else request.inputs
    if len(raws) != len(sent):
        lacking = (
            f"unable to find data for input tensor {sent[len(raws)].name!r} for model {model!r} in request: "
            if len(raws) < len(sent)
            else ""
        )
        raise InvalidRequestError(
            f"{lacking}raw_input_contents has {len(raws)} entries for the {len(sent)} inputs of model {model!r}"
            f"{' that are not in shared memory' if spans else ''}; it must have one for each, in their order"
        )
    return {tensor.name: raw for tensor, raw in zip(sent, raws, strict=True)}


def check_description(tensor: InputMessage, spec: TensorSpec, model: str, batched: bool) -> None:
    """Raise InvalidRequestError if an input's datatype or shape is not the model's."""
    if tensor.datatype != spec.datatype.name:
        datatype(tensor.datatype)
        raise InvalidRequestError(
            f"inference input {spec.name!r} data-type is {tensor.datatype!r}, but model {model!r} expects "
            f"{spec.datatype.name!r}"
        )
    check_shape(tuple(tensor.shape), spec, model, batched)


def check_shape(shape: tuple[int, ...], spec: TensorSpec, model: str, batched: bool) -> None:
    """Raise InvalidRequestError if an input's shape is not the model's."""
    if batched and spec.has_row_axis and not shape:
        raise InvalidRequestError(
            f"input {spec.name!r} has no shape but model {model!r} requires a batch dimension"
        )
    if (len(shape) != len(spec.dims) and not spec.any_rank) or any(
        size != dim if isinstance(dim, int) else size < 0
        for _, dim, size in spec.axes(spec.rows_first(shape))
    ):
        raise InvalidRequestError(
            f"unexpected shape for input {spec.name!r} for model {model!r}. Expected {list(spec.shape)}, "
            f"got {list(shape)}"
            + (f" (axis {spec.batch_axis} counts rows)" if batched and spec.has_row_axis else "")
        )
    if spec.optional and 0 in shape and 0 not in spec.dims:
        raise InvalidRequestError(
            f"optional input {spec.name!r} of model {model!r} has shape {list(shape)}: give it at least one "
            "element along each axis, or leave it out"
        )


def decode_input(
    tensor: InputMessage, spec: TensorSpec, model: str, contents: InputContents, limits: RequestLimits
) -> Tensor:
    """Return an input of a checked description. InvalidRequestError or TensorError if its contents do not fit."""
    kind, shape = spec.datatype, tuple(tensor.shape)
    span, texts, raws = contents.spans.get(spec.name), contents.texts.get(spec.name), contents.raws
    if texts is not None:
        array = _array_of_texts(texts, kind, shape)
    elif span is None and raws is None:
        if not tensor.HasField("contents") and element_count(shape):
            raise InvalidRequestError(
                f"unable to find data for input tensor {spec.name!r} for model {model!r} in request: it has neither "
                "contents nor an entry in raw_input_contents"
            )
        array = decode_contents(tensor.contents, kind, shape)
    else:
        raw = raws[spec.name] if span is None and raws is not None else b""
        nbytes = len(raw) if span is None else span.nbytes
        expected = element_count(shape) * kind.size
        if kind.size and nbytes != expected:
            raise InvalidRequestError(
                f"input byte size mismatch for input {spec.name!r} for model {model!r}. Expected {expected}, got {nbytes} "
                f"({kind.name} of shape {list(shape)})"
            )
        if span is not None:
            raw = span.read()
        if kind.name == "BOOL":
            raw = raw.translate(AS_BOOL)
        if kind.size:
            return Tensor(kind.storage, shape, raw)
        array = decode_raw(raw, kind, shape)
    if kind.name == "BYTES":
        check_string_lengths(array, spec.name, limits)
        return Tensor(kind.storage, shape, array if spec.binary else _decode_text(array))
    return Tensor(kind.storage, shape, array.tobytes())


def _array_of_texts(texts: Sequence[bytes], kind: Datatype, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if kind.name != "BYTES":
        raise TensorError(
            f"text parameters are for BYTES only, and the datatype is {kind.name}: use contents"
        )
    count = element_count(shape)
    if len(texts) != count:
        raise TensorError(f"shape {list(shape)} takes {count} elements, got {len(texts)} in text parameters")
    array = np.empty(count, dtype=object)
    array[:] = texts
    return array.reshape(shape)


def _decode_text(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    texts = np.empty(array.size, dtype=object)
    try:
        texts[:] = [element.decode() for element in array.flat]
    except UnicodeDecodeError as error:
        raise TensorError(f"an element is not UTF-8, which strings must be ({error})") from None
    return texts.reshape(array.shape)


def rows_first(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Return a client's tensor with the rows on axis 0. Several rows are copied."""
    if not spec.batch_axis:
        return tensor
    shape = spec.rows_first(tensor.shape)
    if tensor.dtype.hasobject:
        return Tensor(tensor.dtype, shape, np.moveaxis(tensor.data, spec.batch_axis, 0))
    if shape[0] == 1:
        return Tensor(tensor.dtype, shape, tensor.data)
    array = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
    return Tensor(tensor.dtype, shape, np.moveaxis(array, spec.batch_axis, 0).tobytes())
