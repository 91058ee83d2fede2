"""Steps that other models of the server run: what they need of such a model, and how their requests are made for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from tensorferry.batcher import (
    Batcher,
    InvalidRequest,
    Padding,
    Pipeline,
    StageModel,
    StatefulBatcher,
    Tensor,
)
from tensorferry.server.runtime.axes import EmptyAxes
from tensorferry.server.signature import Signature, TensorSpec


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model that a step names: its version ("" for the latest), and what the step was planned with.

    `signature` has the inputs that the step gives and the outputs that it takes. `batched` says whether axis 0 counts rows.
    """

    name: str
    version: str
    signature: Signature
    batched: bool

    def incompatibility(self, signature: Signature, batcher: Batcher | Pipeline, *, batched: bool) -> str:
        """Return why a model with this signature and batcher cannot run the step; "" if it can."""
        mine = self.signature
        if isinstance(batcher, StatefulBatcher):
            return "it keeps states of sequences now, and a step has no sequence"
        if batched != self.batched:
            return "it has an axis of rows now" if batched else "it has no axis of rows any more"
        given = signature.with_given_inputs({spec.name for spec in mine.inputs})
        if list(map(_kind, given.inputs)) != list(map(_kind, mine.inputs)):
            return f"its inputs are {_listed(given.inputs)} now, and were {_listed(mine.inputs)}"
        outputs = {spec.name: _kind(spec) for spec in signature.outputs}
        for spec in mine.outputs:
            if outputs.get(spec.name) != _kind(spec):
                return f"its outputs are {_listed(signature.outputs)} now, and {spec} was one"
        return ""


def _kind(spec: TensorSpec) -> tuple[object, ...]:
    """Return what must stay the same of a tensor. Names of dimensions may change."""
    return (
        spec.name,
        spec.datatype.name,
        spec.shape,
        spec.binary,
        spec.has_row_axis,
        spec.any_rank,
        spec.batch_axis,
    )


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs))


def stage_model(
    name: str,
    batcher: Batcher | Pipeline,
    padding: Padding | None,
    signature: Signature,
    empty_axes: EmptyAxes,
    *,
    batched: bool,
    alone: bool = False,
    divides: bool = False,
) -> StageModel:
    """Return how requests of steps are made for a model. `signature` has the inputs that they give.

    If `alone`, no request shares a batch, and none is padded. `divides` is as in `StageModel`.
    """
    shared = sorted(signature.shared_inputs(batched=batched))
    check = _shape_check(name, signature, empty_axes)

    def key(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Hashable:
        """Return the key that requests of clients have, too: a model's names and datatypes are always the same."""
        check(tensors)
        if alone:
            return object()
        if not shared:
            return tuple(shapes)
        return "step", tuple(shapes), tuple([(tensors[at].shape, _value(tensors[at])) for at in shared])

    names = frozenset(signature.inputs[at].name for at in shared)
    return StageModel(batcher, None if alone else padding, names, key, divides)


def _value(tensor: Tensor) -> Hashable:
    """Return a key that is equal for equal tensors of one shape only."""
    return tuple(tensor.data.flat) if tensor.dtype.hasobject else bytes(tensor.data)


def _shape_check(
    name: str, signature: Signature, empty_axes: EmptyAxes
) -> Callable[[Sequence[Tensor]], None]:
    """Return a check of a step's inputs, like that of a client's request; it raises InvalidRequest."""
    fixed = [
        (at, len(spec.dims), [(axis, dim) for axis, dim in enumerate(spec.dims) if isinstance(dim, int)])
        for at, spec in enumerate(signature.inputs)
        if not spec.any_rank
    ]

    def check(tensors: Sequence[Tensor]) -> None:
        for at, rank, sizes in fixed:
            shape = tensors[at].shape
            if len(shape) != rank or any(shape[axis] != size for axis, size in sizes):
                spec = signature.inputs[at]
                raise InvalidRequest(
                    f"unexpected shape for input {spec.name!r} for model {name!r}. Expected {list(spec.shape)}, got {list(shape)}"
                )
            if 0 in shape:
                empty_axes.check(name, signature, tensors)

    return check


def restricted(signature: Signature, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Signature:
    """Return the signature with only the inputs and outputs that a step maps."""
    given = signature.with_given_inputs(inputs)
    return replace(given, outputs=tuple(spec for spec in given.outputs if spec.name in outputs), optional=())
