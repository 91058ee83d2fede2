"""The graph of a pipeline's stages: which stage follows which, and which tensors each needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorferry.batcher.pipeline.stage import Stage


@dataclass(frozen=True, slots=True)
class Graph:
    """Stages in an order in which each comes after those whose outputs it reads. Stages are numbers of this order.

    `first` are the stages that read the pipeline's inputs only, `followers` the stages that read outputs of each stage, and
    `waits_for` how many stages each waits for. `kept` has, for each stage, the names of its outputs that are needed later,
    with those of their tensors. `readers` is how many stages read each tensor; the pipeline's outputs count as read by one
    more, because they are kept.
    """

    stages: tuple[Stage, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    first: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]
    waits_for: tuple[int, ...]
    kept: tuple[tuple[tuple[str, str], ...], ...]
    readers: Mapping[str, int]


def graph_of(name: str, stages: Sequence[Stage], inputs: Sequence[str], outputs: Sequence[str]) -> Graph:
    """Return the graph of these stages; raise ValueError if they do not fit together."""
    what = f"pipeline {name!r}"
    if not stages:
        raise ValueError(f"{what} has no stages; give at least one")
    if not inputs or not outputs:
        raise ValueError(
            f"{what} has inputs {list(inputs)} and outputs {list(outputs)}; name at least one of each"
        )
    for kind, names in (
        ("stages", [stage.name for stage in stages]),
        ("inputs", list(inputs)),
        ("outputs", list(outputs)),
    ):
        if twice := sorted(name for name, count in Counter(names).items() if count > 1):
            raise ValueError(f"{what} has several {kind} named {twice}; give each its own name")
    giver = _givers(what, stages, inputs)
    for stage in stages:
        for tensor in stage.inputs.values():
            if tensor not in giver:
                raise ValueError(
                    f"stage {stage.name!r} of {what} reads tensor {tensor!r}, which is neither an input of the pipeline, "
                    f"{list(inputs)}, nor an output of another stage"
                )
    for tensor in outputs:
        if giver.get(tensor) is None:
            raise ValueError(
                f"output {tensor!r} of {what} is not an output of a stage; they give "
                f"{sorted(tensor for tensor, stage in giver.items() if stage is not None)}"
            )
    ordered = _ordered(what, stages, giver)
    number = {stage.name: place for place, stage in enumerate(ordered)}
    befores: list[set[int]] = []
    for stage in ordered:
        givers = {giver[tensor] for tensor in stage.inputs.values()} - {None}
        befores.append({number[before.name] for before in givers if before is not None})
    readers = Counter(tensor for stage in ordered for tensor in set(stage.inputs.values()))
    readers.update(outputs)
    return Graph(
        tuple(ordered),
        tuple(inputs),
        tuple(outputs),
        first=tuple(place for place, before in enumerate(befores) if not before),
        followers=tuple(
            tuple(later for later, before in enumerate(befores) if place in before)
            for place in range(len(ordered))
        ),
        waits_for=tuple(len(before) for before in befores),
        kept=tuple(
            tuple((output, tensor) for output, tensor in stage.outputs.items() if readers[tensor])
            for stage in ordered
        ),
        readers={tensor: count for tensor, count in readers.items() if count},
    )


def _givers(what: str, stages: Sequence[Stage], inputs: Sequence[str]) -> dict[str, Stage | None]:
    """Return the stage that gives each tensor, None for an input of the pipeline."""
    giver: dict[str, Stage | None] = dict.fromkeys(inputs)
    for stage in stages:
        for tensor in stage.outputs.values():
            if tensor in giver:
                other = giver[tensor]
                by = "is an input of the pipeline" if other is None else f"is given by stage {other.name!r}"
                raise ValueError(
                    f"stage {stage.name!r} of {what} gives tensor {tensor!r}, which {by}; give it another name"
                )
            giver[tensor] = stage
    return giver


def _ordered(what: str, stages: Sequence[Stage], giver: Mapping[str, Stage | None]) -> list[Stage]:
    """Return the stages in an order in which they can run, otherwise as given; raise ValueError if there is none."""
    ordered: list[Stage] = []
    there = {tensor for tensor, stage in giver.items() if stage is None}
    left = list(stages)
    while left:
        ready = next((stage for stage in left if there.issuperset(stage.inputs.values())), None)
        if ready is None:
            raise ValueError(
                f"stages {[stage.name for stage in left]} of {what} wait for each other's outputs, or for those of such "
                "stages: remove the cycle"
            )
        ordered.append(ready)
        left.remove(ready)
        there.update(ready.outputs.values())
    return ordered
