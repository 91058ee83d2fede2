"""The stages of a pipeline, as their author declares them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tensorferry.batcher.batcher import Batcher
from tensorferry.batcher.padding import Padding
from tensorferry.batcher.request import Tensor

if TYPE_CHECKING:
    from tensorferry.batcher.pipeline.pipeline import Pipeline

# Returns the key of a request from its tensors and their shapes behind axis 0, padded if they are padded.
KeyFunction: TypeAlias = Callable[[Sequence[Tensor], Sequence[tuple[int, ...]]], Hashable]

_NONE: frozenset[str] = frozenset()


class StageModel(NamedTuple):
    """A batcher that runs the requests of a stage, and how they are made for it.

    `padding` plans each request. `shared` names the inputs without rows. Requests of equal `key` may share a batch. Without
    `key`, they must agree in names, datatypes, shapes behind axis 0, and the values of shared inputs. A key function is for
    a batcher with other callers, whose requests may then share batches with the stage's: requests of equal keys must agree
    in all of that, too, and in the order of their inputs. If it `divides`, the rows of a request run apart if they differ in
    length along an axis that is not padded, for a model whose answers may depend on that. Otherwise the shorter ones are
    filled up.
    """

    batcher: Batcher | Pipeline
    padding: Padding | None = None
    shared: frozenset[str] = _NONE
    key: KeyFunction | None = None
    divides: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One stage of a `Pipeline`.

    `inputs` maps each input of the stage's model to the pipeline's tensor that it reads. Its order is that of the request's
    tensors. `outputs` maps outputs of the model to the pipeline's tensors that they become; others are dropped.

    `batcher` belongs to the pipeline, which drains and closes it. It may also be a function that returns the `StageModel`
    for a request. It is called for each request, on any thread, and must not block: for a model that has other callers,
    too, and may be replaced. An exception that it raises is the request's. `padding`, `shared`, `key` and `divides` are
    those of a `StageModel`; a function gives its own.
    """

    name: str
    batcher: Batcher | Pipeline | Callable[[], StageModel]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    padding: Padding | None = None
    shared: frozenset[str] = _NONE
    key: KeyFunction | None = None
    divides: bool = False
    # None if the function returns it.
    own: StageModel | None = field(init=False, repr=False, compare=False)
    model: Callable[[], StageModel] = field(init=False, repr=False, compare=False)
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError(f"stage {self.name!r} has no inputs; name at least one")
        if not self.outputs:
            raise ValueError(f"stage {self.name!r} has no outputs; name at least one")
        if unknown := self.shared - self.inputs.keys():
            raise ValueError(
                f"stage {self.name!r} shares {sorted(unknown)}; its inputs are {list(self.inputs)}"
            )
        given = self.padding, self.shared, self.key, self.divides
        own: StageModel | None = None
        if callable(self.batcher):
            if given != (None, _NONE, None, False):
                raise ValueError(
                    f"stage {self.name!r} gets its batcher from a function; padding, shared, key and divides belong to the "
                    "StageModel that it returns"
                )
            lookup = self.batcher
        else:
            own = StageModel(self.batcher, *given)
            lookup = partial(_same, own)
        object.__setattr__(self, "own", own)
        object.__setattr__(self, "model", lookup)
        object.__setattr__(self, "names", tuple(self.inputs))


def _same(model: StageModel) -> StageModel:
    return model
