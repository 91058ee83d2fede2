"""The graph of a pipeline's stages: which stage follows which, and which tensors each needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorferry.batcher.pipeline.dag import dag_of
from tensorferry.batcher.pipeline.stage import Stage


@dataclass(frozen=True, slots=True)
class Graph:
    """Stages in an order in which each comes after those whose outputs it reads. Stages are numbers of this order.

    `first` are the stages that read the pipeline's inputs only, `followers` the stages that read outputs of each stage, and
    `waits_for` how many stages each waits for. `needed_later` has, for each stage, the names of its outputs that are needed
    later, with those of their tensors. `readers` is how many stages read each tensor; the pipeline's outputs count as read by one
    more, because they are kept.
    """

    stages: tuple[Stage, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    first: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]
    waits_for: tuple[int, ...]
    needed_later: tuple[tuple[tuple[str, str], ...], ...]
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
    dag = dag_of([(stage.inputs.values(), stage.outputs.values()) for stage in stages], inputs)
    producers = dag.producers
    if dag.clash is not None:
        tensor, number = dag.clash
        by = (
            "is an input of the pipeline"
            if tensor in inputs
            else f"is given by stage {stages[producers[tensor]].name!r}"
        )
        raise ValueError(
            f"stage {stages[number].name!r} of {what} gives tensor {tensor!r}, which {by}; give it another name"
        )
    for number in dag.stuck:
        for tensor in stages[number].inputs.values():
            if tensor in dag.missing:
                raise ValueError(
                    f"stage {stages[number].name!r} of {what} reads tensor {tensor!r}, which is neither an input of the "
                    f"pipeline, {list(inputs)}, nor an output of another stage"
                )
    for tensor in outputs:
        if tensor not in producers:
            raise ValueError(
                f"output {tensor!r} of {what} is not an output of a stage; they give {sorted(producers)}"
            )
    if dag.stuck:
        raise ValueError(
            f"stages {[stages[number].name for number in dag.stuck]} of {what} wait for each other's outputs, or for those "
            "of such stages: remove the cycle"
        )
    ordered = [stages[number] for number in dag.order]
    places = {number: place for place, number in enumerate(dag.order)}
    befores = [
        {places[producers[tensor]] for tensor in stage.inputs.values() if tensor in producers}
        for stage in ordered
    ]
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
        needed_later=tuple(
            tuple((output, tensor) for output, tensor in stage.outputs.items() if readers[tensor])
            for stage in ordered
        ),
        readers={tensor: count for tensor, count in readers.items() if count},
    )
