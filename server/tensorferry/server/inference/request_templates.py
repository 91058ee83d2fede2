"""Request forms: what was read and checked once for all requests that differ in values and id only.

Most callers send the same request again and again: the bytes around the tensors' values, and around
the id, are the same each time. A protobuf message with other bytes in a length-delimited field of the
same length parses to the same message but for that field, so nothing else need be parsed or checked
again, and values need not be copied out of the message. Whatever does not match byte for byte goes
the long way, through `codec.decode_request`.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from tensorferry.batcher import Outcome, PadPlan, Request, Tensor
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.classification import Classifier
from tensorferry.server.inference.codec import DecodedRequest, ResponseSpec
from tensorferry.server.inference.responses import ResponseTemplate
from tensorferry.server.models.registry import Model
from tensorferry.server.signature import Signature
from tensorferry.server.wire.fields import DELIMITED, MalformedError, fields

# Bounds on what is remembered, and on the fields of a message that is looked into: a message of
# very many fields is not worth it, and would keep the thread that reads for long.
_MOST_SIZES = 256
_MOST_OF_A_SIZE = 8
_MOST_FIELDS = 128
# What a message says beside values and id is kept; a client may say a lot, of each size something else.
_MOST_FIXED_BYTES = 8 * 1024

# Below this, a copy of the values costs less than a view that keeps the message alive.
_VIEW_BYTES = 16 * 1024

# Of a longer input without rows a digest is kept.
_MOST_VALUE_BYTES = 4096

_new = tuple.__new__

_ID_FIELD = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["id"].number
_RAW_FIELD = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """Everything about a request but its values, id and deadline."""

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
    patience: float
    plan: PadPlan | None
    response: ResponseTemplate

    def request(
        self,
        tensors: tuple[Tensor, ...],
        completed: Callable[[Outcome], None],
        deadline: float,
        client: str,
        request_id: str = "",
    ) -> Request:
        """A request of a client for the batcher."""
        return Request(
            tensors,
            completed,
            names=self.names,
            rows=self.rows,
            nbytes=self.nbytes,
            key=self.key,
            deadline=deadline,
            priority=self.priority,
            padding=self.plan,
            patience=self.patience,
            tag=request_id,
            client=client,
            shared=self.shared,
        )


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Where in a message the id and the raw contents are, and the bytes around them.

    Spans are (start, stop) in bytes. `id_field` includes the field's tag and length; it and `id`
    are empty spans where the message has no id.
    """

    fixed: tuple[tuple[int, bytes], ...]
    id_field: tuple[int, int]
    id: tuple[int, int]
    raws: tuple[tuple[int, int], ...]


# A message's form, and what is its own: the id, its serialised field, and the tensors.
Match: TypeAlias = tuple[RequestTemplate, str, bytes, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A form with its layout; `tensors` says for each of the model's inputs what it is and where."""

    form: RequestTemplate
    layout: MessageLayout
    tensors: tuple[tuple[np.dtype[Any], tuple[int, ...], int, int], ...]

    def read(self, data: bytes) -> Match | None:
        """What is in a message of the layout's size; None when it is another one."""
        layout = self.layout
        for start, fixed in layout.fixed:
            if not data.startswith(fixed, start):
                return None
        start, stop = layout.id
        try:
            request_id = data[start:stop].decode()
        except UnicodeDecodeError:
            # No protobuf message: whoever parses it says so.
            return None
        start, stop = layout.id_field
        values = data if len(data) < _VIEW_BYTES else memoryview(data)
        # As `Tensor(...)`, in half the time.
        tensors = tuple(
            [_new(Tensor, (dtype, shape, values[at:end])) for dtype, shape, at, end in self.tensors]
        )
        return self.form, request_id, data[start:stop], tensors


class RequestTemplateCache:
    """What is remembered of late: forms, found by a message's bytes, and response forms. Thread-safe.

    All is of a registry's `generation`: when a model comes or goes, it is forgotten. No response may have more than
    `most_bytes`.
    """

    def __init__(self, most_bytes: float = math.inf) -> None:
        self._most_bytes = most_bytes
        # Guards changes. What is found by a size is a tuple that is replaced: looking needs no lock.
        self._lock = threading.Lock()
        self._generation = -1
        self._by_size: dict[int, tuple[_Entry, ...]] = {}
        self._responses: dict[Hashable, ResponseTemplate] = {}

    def find(self, data: bytes, generation: int) -> Match | None:
        """What is in a message of a form that is known; None when it is of none."""
        if generation != self._generation:
            return None
        for known in self._by_size.get(len(data), ()):
            if (found := known.read(data)) is not None:
                return found
        return None

    def add(
        self,
        data: bytes,
        request: pb.ModelInferRequest,
        model: Model,
        decoded: DecodedRequest,
        generation: int,
    ) -> RequestTemplate:
        """The form of a request that was decoded, remembered where others may match it."""
        wanted = decoded.wanted
        wants = (model.name, model.version, tuple([spec.name for spec in wanted.outputs]), *wanted[1:])
        with self._lock:
            full = len(self._by_size) >= _MOST_SIZES or len(self._responses) >= _MOST_SIZES
            if generation > self._generation or (full and generation == self._generation):
                self._forget_locked(generation)
            if generation < self._generation:
                # Looked up before a model came or went: for this request, and to be forgotten.
                return uncached_template(model, decoded, self._most_bytes)
            response = self._responses.get(wants)
            if response is None:
                response = self._responses[wants] = _response_template(model, wanted, self._most_bytes)
            form = _template_of(model, decoded, response)
            known = _known(data, request, model, decoded, form)
            if known is not None:
                others = self._by_size.get(len(data), ())
                self._by_size[len(data)] = (known, *others[: _MOST_OF_A_SIZE - 1])
        return form

    def forget(self, generation: int) -> None:
        """Lets go of what is of an earlier generation: it holds models that may be gone."""
        with self._lock:
            if generation > self._generation:
                self._forget_locked(generation)

    def _forget_locked(self, generation: int) -> None:
        # Replaced, not emptied: who looks meanwhile must not find forms of another generation.
        self._by_size, self._responses = {}, {}
        self._generation = generation


def uncached_template(model: Model, decoded: DecodedRequest, most_bytes: float = math.inf) -> RequestTemplate:
    """The form of a request that no other is known by: one with tensors in shared memory."""
    return _template_of(model, decoded, _response_template(model, decoded.wanted, most_bytes))


def _response_template(model: Model, wanted: ResponseSpec, most_bytes: float) -> ResponseTemplate:
    classifier = Classifier(model.batched, model.labels)
    return ResponseTemplate(model.name, model.version, wanted, classifier, most_bytes)


def _template_of(model: Model, decoded: DecodedRequest, response: ResponseTemplate) -> RequestTemplate:
    names = tuple([spec.name for spec in decoded.signature.inputs])
    plan = None
    if model.padding is not None:
        plan = model.padding.plan(names, [(tensor.dtype, tensor.shape) for tensor in decoded.tensors])
    timeout, patience = min(decoded.timeout, model.slo), math.inf
    if model.batcher.policies:
        # A model's queue policy says what a request's timeout means: how long it may be queued, or nothing.
        timeout, patience = model.slo, decoded.timeout
    return RequestTemplate(
        model,
        names,
        decoded.signature,
        tuple([tensor.shape for tensor in decoded.tensors]),
        decoded.shared,
        rows=decoded.rows,
        nbytes=decoded.nbytes if plan is None else decoded.nbytes + plan.added_bytes,
        key=_key(decoded.key if plan is None else plan.shapes, model, decoded),
        # As in Triton: a class that there is not is the default.
        priority=decoded.priority if decoded.priority <= model.batcher.priorities else 0,
        timeout=timeout,
        patience=patience,
        plan=plan,
        response=response,
    )


def _key(shapes: Hashable, model: Model, decoded: DecodedRequest) -> Hashable:
    """What requests of one batch have in common: the shapes of their rows, and the inputs without rows."""
    inputs = decoded.signature.inputs
    if _runs_alone(model, decoded):
        return object()
    if not decoded.shared:
        return shapes
    return shapes, tuple([(inputs[at].name, _value(decoded.tensors[at])) for at in sorted(decoded.shared)])


def _runs_alone(model: Model, decoded: DecodedRequest) -> bool:
    """Whether a request shares no batch: it gives an optional input that may be made for its rows alone.

    That is so of one whose shape may vary, and of any if the model was only tested: it was then run without.
    """
    extra = decoded.signature.inputs[len(model.signature.inputs) :]
    return any(
        model.batching_verdict == "tested" or not all(isinstance(dim, int) for dim in spec.dims)
        for spec in extra
    )


def _value(tensor: Tensor) -> Hashable:
    """Equal for equal tensors alone."""
    if tensor.dtype.hasobject:
        return tuple(tensor.data.flat)
    data = tensor.data
    return bytes(data) if len(data) <= _MOST_VALUE_BYTES else hashlib.sha256(data).digest()


def _known(
    data: bytes, request: pb.ModelInferRequest, model: Model, decoded: DecodedRequest, form: RequestTemplate
) -> _Entry | None:
    """The form with its layout; None where no other message can be known by it."""
    inputs = decoded.signature.inputs
    # Typed contents and strings are values that would be among the fixed bytes.
    if decoded.wanted.typed or not all(spec.datatype.size for spec in inputs) or _runs_alone(model, decoded):
        return None
    layout = message_layout(data)
    if layout is None:
        return None
    raws = dict(zip([tensor.name for tensor in request.inputs], layout.raws, strict=True))
    # Inputs without rows are in the form's key, so that only a message with the same is known by it.
    spans = [raws[inputs[at].name] for at in decoded.shared]
    layout = replace(layout, fixed=(*layout.fixed, *((start, data[start:stop]) for start, stop in spans)))
    if sum([len(fixed) for _, fixed in layout.fixed]) > _MOST_FIXED_BYTES:
        return None
    tensors = [
        (tensor.dtype, tensor.shape, *raws[spec.name])
        for spec, tensor in zip(inputs, decoded.tensors, strict=True)
    ]
    return _Entry(form, layout, tuple(tensors))


def message_layout(data: bytes) -> MessageLayout | None:
    """The layout of a serialised ModelInferRequest; None where it is not as every library writes it."""
    identity = id_field = (0, 0)
    raws: list[tuple[int, int]] = []
    fixed: list[tuple[int, bytes]] = []
    position = since = 0
    try:
        for field in islice(fields(data, 0, len(data)), _MOST_FIELDS):
            number, kind, value, stop = field
            start, position = position, stop
            # Every field of the message is length-delimited.
            if kind != DELIMITED:
                return None
            if number == _ID_FIELD:
                if identity != (0, 0):
                    return None
                id_field, identity = (start, stop), (value, stop)
            elif number == _RAW_FIELD:
                raws.append((value, stop))
            else:
                continue
            fixed.append((since, data[since:value]))
            since = position
    except MalformedError:
        return None
    if position < len(data):
        return None
    fixed.append((since, data[since:]))
    return MessageLayout(tuple(fixed), id_field, identity, tuple(raws))
