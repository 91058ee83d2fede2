"""Request templates: what was parsed and checked once, for all requests that differ only in values and ids.

Most clients send the same request again and again. The bytes around the tensors' values and the id are then equal.
A protobuf message parses to the same message if only the contents of a length-delimited field change, at the same
length. So nothing but the values is read again, and they are not copied. A message that matches no template byte for
byte is decoded by `codec.decode_request`.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from tensorferry.batcher import PadPlan, SequenceTag, StatefulBatcher, Tensor
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.requests.codec import DecodedRequest, ResponseSpec
from tensorferry.server.inference.requests.input_contents import AS_BOOL
from tensorferry.server.inference.responses.classification import Classifier
from tensorferry.server.inference.responses.responses import ResponseTemplate
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.runtime.axes import empty_outputs
from tensorferry.server.signature import Signature
from tensorferry.server.wire.fields import DELIMITED, VARINT, MalformedError, fields, varint
from tensorferry.server.wire.parameters import LONGEST_ID, SEQUENCE_ID

# Bounds of the cache. Sizes are those of messages.
_MAX_SIZES = 256
_MAX_ENTRIES_OF_A_SIZE = 8
# The bytes of a message beside values and id. A client could send many, different in each message.
_MAX_FIXED_BYTES = 8 * 1024
# A message of more fields becomes no template, because finding them takes long.
_MAX_FIELDS = 128

# Below this size, a copy of the values costs less than a view that keeps the message alive.
_VIEW_BYTES = 16 * 1024

# The key has a digest in place of a longer input without rows.
_MAX_KEY_VALUE_BYTES = 4096

_new = tuple.__new__

_ID_FIELD = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["id"].number
_PARAMETERS_FIELD = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["parameters"].number
_CHOICES = pb.InferParameter.DESCRIPTOR.fields_by_name
# Numbers and wire types of the fields of a parameter, and of the two fields that may have the id of a sequence.
_PARAMETER = [(1, DELIMITED), (2, DELIMITED)]
_INTEGER, _TEXT = (_CHOICES["int64_param"].number, VARINT), (_CHOICES["string_param"].number, DELIMITED)
_SEQUENCE_ID = SEQUENCE_ID.encode()
_RAW_FIELD = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """Everything about a request but its values, id and deadline.

    `timeout` and `max_queue_time` are in seconds, inf for none. `shapes` are those of the inputs, in the order of `names`.
    `batch_axes` has that of each output whose batch axis is not the first, as clients see it. `sequence` is set for a model
    with states; its id and its owner are those of each request. `empty_final` and `custom` are as in `RequestParameters`.
    """

    model: Model
    names: tuple[str, ...]
    signature: Signature
    shapes: tuple[tuple[int, ...], ...]
    shared: frozenset[int]
    rows: int
    nbytes: int
    key: Hashable
    priority: int
    timeout: float
    max_queue_time: float
    padding: PadPlan | None
    batch_axes: Mapping[str, int]
    response: ResponseTemplate
    sequence: SequenceTag | None = None
    empty_final: bool = False
    custom: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Where the id, the raw contents and the id of the sequence are in a message, and the bytes around them.

    Positions are (start, stop) in bytes. `id_field` includes the field's tag and length. Both `id_field` and `id` are
    empty if the message has no id. `fixed` has the start and the bytes of each part that never changes. `sequence` is empty
    for a message without a sequence; `names_sequence` says that its id is a text.
    """

    fixed: tuple[tuple[int, bytes], ...]
    id_field: tuple[int, int]
    id: tuple[int, int]
    raws: tuple[tuple[int, int], ...]
    sequence: tuple[int, int] = (0, 0)
    names_sequence: bool = False


# A message's template, its id, its id as a serialised field, its tensors, and its sequence.
Match: TypeAlias = tuple[RequestTemplate, str, bytes, tuple[Tensor, ...], SequenceTag | None]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A template with its layout. `tensors` has dtype, shape, start and stop of each of the model's inputs.

    `bools` has start and stop of those of datatype BOOL.
    """

    template: RequestTemplate
    layout: MessageLayout
    tensors: tuple[tuple[np.dtype[Any], tuple[int, ...], int, int], ...]
    bools: tuple[tuple[int, int], ...]


class RequestTemplateCache:
    """The templates of recent requests, found by a message's bytes. Thread-safe.

    All of them belong to one generation of the registry: when a model comes or goes, the cache is emptied.
    A response may have at most `max_bytes`.
    """

    def __init__(self, max_bytes: float = math.inf) -> None:
        self._max_bytes = max_bytes
        # Guards changes of the fields below. `find` needs no lock, because dicts and tuples are replaced, not emptied.
        self._lock = threading.Lock()
        self._generation = -1
        self._by_size: dict[int, tuple[_Entry, ...]] = {}
        self._responses: dict[Hashable, ResponseTemplate] = {}

    def find(self, data: bytes, generation: int) -> Match | None:
        """Match a message against the templates; None if it differs from each in more than values and id."""
        if generation != self._generation:
            return None
        for entry in self._by_size.get(len(data), ()):
            layout = entry.layout
            for start, fixed in layout.fixed:
                if data[start : start + len(fixed)] != fixed:
                    break
            else:
                for start, stop in entry.bools:
                    if (raw := data[start:stop]).translate(None, b"\0\1"):
                        data = b"".join((data[:start], raw.translate(AS_BOOL), data[stop:]))
                start, stop = layout.id
                try:
                    request_id = str(data[start:stop], "utf-8")
                except UnicodeDecodeError:
                    # Parsing reports the error.
                    return None
                sequence = entry.template.sequence
                if layout.sequence != (0, 0):
                    number = _sequence_id(data, layout)
                    if number is None:
                        return None
                    if sequence is not None:
                        sequence = _tag_of(sequence, number)
                start, stop = layout.id_field
                values = data if len(data) < _VIEW_BYTES else memoryview(data)
                tensors = []
                for dtype, shape, at, end in entry.tensors:
                    # Half the time of `Tensor(...)`, for each tensor of each request.
                    tensors.append(_new(Tensor, (dtype, shape, values[at:end])))
                return entry.template, request_id, data[start:stop], tuple(tensors), sequence
        return None

    def add(
        self,
        data: bytes,
        message: pb.ModelInferRequest,
        model: Model,
        decoded: DecodedRequest,
        generation: int,
    ) -> RequestTemplate:
        """Return the template of a decoded request. Keep it if other requests may match it."""
        spec = decoded.response_spec
        outputs = tuple([(output.spec.name, output.class_count) for output in spec.outputs])
        key = (model.name, model.version, outputs, *spec[1:])
        with self._lock:
            full = len(self._by_size) >= _MAX_SIZES or len(self._responses) >= _MAX_SIZES
            if generation > self._generation or (full and generation == self._generation):
                self._forget_locked(generation)
            if generation < self._generation:
                # The model was looked up before another came or went.
                return uncached_template(model, decoded, self._max_bytes)
            response = self._responses.get(key)
            if response is None:
                response = self._responses[key] = _response_template(model, spec, self._max_bytes)
            template = _template_of(model, decoded, response)
            entry = _entry_of(data, message, model, decoded, template)
            if entry is not None:
                others = self._by_size.get(len(data), ())
                self._by_size[len(data)] = (entry, *others[: _MAX_ENTRIES_OF_A_SIZE - 1])
        return template

    def forget(self, generation: int) -> None:
        """Release templates of an earlier generation, because they refer to models that may be gone."""
        with self._lock:
            if generation > self._generation:
                self._forget_locked(generation)

    def _forget_locked(self, generation: int) -> None:
        self._by_size, self._responses = {}, {}
        self._generation = generation


def outputs_without_run(model: Model, decoded: DecodedRequest) -> Mapping[str, Any] | None:
    """Return the outputs of a request without rows, for which no model runs; None if its model runs.

    InvalidRequestError for outputs of unknown shape, and for an axis of length zero that the model does not support.
    """
    if not model.batched or decoded.rows:
        model.empty_axes.check(model.name, decoded.signature, decoded.tensors)
        return None
    outputs = [output.spec for output in decoded.response_spec.outputs]
    return empty_outputs(model.name, decoded.signature, outputs, decoded.tensors)


def uncached_template(model: Model, decoded: DecodedRequest, max_bytes: float = math.inf) -> RequestTemplate:
    """Return the template of a request that no other matches, such as one with tensors in shared memory."""
    return _template_of(model, decoded, _response_template(model, decoded.response_spec, max_bytes))


def _response_template(model: Model, response_spec: ResponseSpec, max_bytes: float) -> ResponseTemplate:
    classifier = Classifier(model.batched, model.labels)
    return ResponseTemplate(model.name, model.version, response_spec, classifier, max_bytes)


def _template_of(model: Model, decoded: DecodedRequest, response: ResponseTemplate) -> RequestTemplate:
    names, parameters = tuple([spec.name for spec in decoded.signature.inputs]), decoded.parameters
    padding, alone = None, _runs_alone(model, decoded)
    # An optional input with the padded axis has no pad value.
    if model.padding is not None and not alone:
        padding = model.padding.plan(names, [(tensor.dtype, tensor.shape) for tensor in decoded.tensors])
    timeout, max_queue_time = min(parameters.timeout, model.slo), math.inf
    if model.batcher.policies:
        # With a queue policy the request's timeout bounds its time in the queue, or means nothing.
        timeout, max_queue_time = model.slo, parameters.timeout
    return RequestTemplate(
        model,
        names,
        decoded.signature,
        tuple([tensor.shape for tensor in decoded.tensors]),
        decoded.shared,
        rows=decoded.rows,
        nbytes=decoded.nbytes if padding is None else decoded.nbytes + padding.added_bytes,
        key=object() if alone else _batch_key(decoded.key if padding is None else padding.shapes, decoded),
        # As in Triton, an unknown class means the default.
        priority=parameters.priority if parameters.priority <= model.batcher.priorities else 0,
        timeout=timeout,
        max_queue_time=max_queue_time,
        padding=padding,
        batch_axes={
            spec.name: spec.batch_axis
            for spec in decoded.signature.outputs + decoded.signature.on_request
            if spec.batch_axis
        },
        response=response,
        sequence=_sequence_of(model, decoded),
        empty_final=parameters.empty_final,
        custom=parameters.custom,
    )


def _sequence_of(model: Model, decoded: DecodedRequest) -> SequenceTag | None:
    if not isinstance(model.batcher, StatefulBatcher):
        return None
    wanted = frozenset(output.spec.name for output in decoded.response_spec.outputs)
    if decoded.parameters.sequence is None:
        return SequenceTag(None, start=True, end=True, wanted=wanted)
    number, start, end = decoded.parameters.sequence
    return SequenceTag(number, start=start, end=end, wanted=wanted)


def _batch_key(shapes: Hashable, decoded: DecodedRequest) -> Hashable:
    """Return what requests of one batch have in common: the shapes of their rows, and the inputs without rows."""
    inputs = decoded.signature.inputs
    if not decoded.shared:
        return shapes
    return shapes, tuple(
        [(inputs[at].name, _value_key(decoded.tensors[at])) for at in sorted(decoded.shared)]
    )


def _runs_alone(model: Model, decoded: DecodedRequest) -> bool:
    """Whether a request may share no batch.

    An optional input that it gives may depend on its rows: one of variable shape, or any if the model's batching was only
    tested, because the test ran without it. A proof holds only if dimensions of one name have one length.
    """
    if model.batching_verdict == "proved":
        named = decoded.signature.named_lengths([tensor.shape for tensor in decoded.tensors])
        if None in named.values():
            return True
    extra = decoded.signature.inputs[len(model.signature.inputs) :]
    return any(
        model.batching_verdict == "tested" or not all(isinstance(dim, int) for dim in spec.dims)
        for spec in extra
    )


def _value_key(tensor: Tensor) -> Hashable:
    """Return a key that is equal for equal tensors only."""
    if tensor.dtype.hasobject:
        return tuple(tensor.data.flat)
    data = tensor.data
    return bytes(data) if len(data) <= _MAX_KEY_VALUE_BYTES else hashlib.sha256(data).digest()


def _entry_of(
    data: bytes,
    message: pb.ModelInferRequest,
    model: Model,
    decoded: DecodedRequest,
    template: RequestTemplate,
) -> _Entry | None:
    """Return the template with its layout; None if no other message can match it."""
    inputs = decoded.signature.inputs
    # Typed contents and strings would be among the fixed bytes, so only equal values would match.
    if (
        decoded.response_spec.typed
        or not all(spec.datatype.size for spec in inputs)
        or _runs_alone(model, decoded)
        # Several rows of such inputs are copied.
        or (decoded.rows > 1 and decoded.signature.batch_axes)
    ):
        return None
    layout = message_layout(data)
    if layout is None:
        return None
    sequence = template.sequence
    if layout.sequence != (0, 0) and sequence is not None and sequence.id is None:
        # An id of 0 is none, and other ids could match it.
        return None
    raws = dict(zip([tensor.name for tensor in message.inputs], layout.raws, strict=True))
    # Inputs without rows are part of the template's key, so their bytes must be equal too.
    shared = [raws[inputs[at].name] for at in decoded.shared]
    layout = replace(layout, fixed=(*layout.fixed, *((start, data[start:stop]) for start, stop in shared)))
    if sum([len(fixed) for _, fixed in layout.fixed]) > _MAX_FIXED_BYTES:
        return None
    tensors = [
        (tensor.dtype, tensor.shape, *raws[spec.name])
        for spec, tensor in zip(inputs, decoded.tensors, strict=True)
    ]
    bools = tuple([raws[spec.name] for spec in inputs if spec.datatype.name == "BOOL"])
    return _Entry(template, layout, tuple(tensors), bools)


def message_layout(data: bytes) -> MessageLayout | None:
    """Return the layout of a serialised ModelInferRequest; None if it is unusual, such as with two ids."""
    request_id = id_field = sequence = (0, 0)
    names_sequence = False
    raws: list[tuple[int, int]] = []
    fixed: list[tuple[int, bytes]] = []
    position = fixed_start = 0
    try:
        for each in islice(fields(data, 0, len(data)), _MAX_FIELDS):
            number, kind, value, stop = each
            start, position = position, stop
            # All fields of ModelInferRequest are length-delimited.
            if kind != DELIMITED:
                return None
            if number == _ID_FIELD:
                if request_id != (0, 0):
                    return None
                id_field, request_id = (start, stop), (value, stop)
            elif number == _RAW_FIELD:
                raws.append((value, stop))
            elif number == _PARAMETERS_FIELD and (found := _sequence_in(data, value, stop)) is not None:
                if sequence != (0, 0):
                    return None
                value, stop, names_sequence = found
                sequence = (value, stop)
            else:
                continue
            fixed.append((fixed_start, data[fixed_start:value]))
            fixed_start = stop
    except MalformedError:
        return None
    if position < len(data):
        return None
    fixed.append((fixed_start, data[fixed_start:]))
    return MessageLayout(tuple(fixed), id_field, request_id, tuple(raws), sequence, names_sequence)


def _sequence_in(data: bytes, start: int, stop: int) -> tuple[int, int, bool] | None:
    """Return where a parameter has the id of a sequence, and whether it is a text; None for another parameter.

    MalformedError if the id is not written as libraries write it, because parsers take the last of several.
    """
    entry = list(fields(data, start, stop))
    if not any(number == 1 and data[value:end] == _SEQUENCE_ID for number, _, value, end in entry):
        return None
    if [part[:2] for part in entry] == _PARAMETER:
        choices = list(fields(data, *entry[1][2:]))
        if len(choices) == 1 and choices[0][:2] in (_INTEGER, _TEXT):
            ((_, kind, value, end),) = choices
            return value, end, kind == DELIMITED
    raise MalformedError("the id of a sequence in an unusual form")


def _sequence_id(data: bytes, layout: MessageLayout) -> int | str | None:
    """Return the id of a message's sequence; None if parsing must look at it."""
    start, stop = layout.sequence
    try:
        if layout.names_sequence:
            name = str(data[start:stop], "utf-8")
            return name if len(name) <= LONGEST_ID else None
        number, end = varint(data, start)
    except (UnicodeDecodeError, MalformedError, IndexError):
        return None
    if end != stop:
        return None
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _tag_of(known: SequenceTag, number: int | str) -> SequenceTag:
    """Return the tag of a request that differs from a known one in the id of its sequence."""
    return (
        known._replace(id=number) if number else SequenceTag(None, start=True, end=True, wanted=known.wanted)
    )
