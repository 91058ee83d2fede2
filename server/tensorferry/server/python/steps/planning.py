"""Planning of a pipeline: which steps form a stage, what each stage reads and gives, and what clients see.

Steps that follow each other form one stage if one batch can run through them: they have the same largest batch and the same
number of instances, let requests share batches alike, run on the same kind of device, and the later one is not padded and sees no padding of the earlier ones. A
stage has one batcher; between stages batches are formed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count

from tensorferry.batcher.pipeline.dag import dag_of
from tensorferry.server.errors import StartError
from tensorferry.server.python.steps.loaded_step import LoadedStep
from tensorferry.server.python.steps.named_model import ModelReference
from tensorferry.server.signature import Signature, TensorSpec


@dataclass(frozen=True, slots=True)
class StepBinding:
    """A step of a pipeline.

    `inputs` and `outputs` map the step's names to the pipeline's tensors. The step is loaded here as `step`, or `used` is
    another model of the server, which has its own batcher.
    """

    name: str
    signature: Signature
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    step: LoadedStep | None = None
    used: ModelReference | None = None
    # The inputs whose tensor the declaration does not name.
    unnamed: frozenset[str] = frozenset()

    @property
    def has_own_names(self) -> bool:
        """Whether the pipeline has its tensors by the step's own names."""
        names = [*self.inputs.items(), *self.outputs.items()]
        return all(own == tensor for own, tensor in names)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Steps that run on the same batch. `inputs` are the tensors that it reads, `outputs` those that others read of it.

    Its name has those of its steps. No other stage has the same.
    """

    name: str
    steps: tuple[StepBinding, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def shared(self) -> frozenset[str]:
        """The tensors without rows that it reads."""
        return frozenset(
            name
            for step in self.steps
            for spec in step.signature.inputs
            if not spec.has_row_axis and (name := step.inputs[spec.name]) in self.inputs
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages of a pipeline, each after those that it reads from, and the signature that clients see."""

    stages: tuple[PlannedStage, ...]
    signature: Signature


def place(
    name: str,
    signature: Signature,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    step: LoadedStep | None = None,
    used: ModelReference | None = None,
) -> StepBinding:
    """Return a step with complete mappings: names that are not given are the same in the pipeline.

    StartError for a name that the step does not have.
    """
    own = {
        "input": [spec.name for spec in signature.inputs],
        "output": [spec.name for spec in signature.outputs],
    }
    for kind, given in (("input", inputs), ("output", outputs)):
        for unknown in given.keys() - set(own[kind]):
            raise StartError(f"step {name!r} has no {kind} {unknown!r}; it has {', '.join(own[kind])}")
    return StepBinding(
        name,
        signature,
        {tensor: inputs.get(tensor, tensor) for tensor in own["input"]},
        {tensor: outputs.get(tensor, tensor) for tensor in own["output"]},
        step,
        used,
        frozenset(own["input"]) - inputs.keys(),
    )


def plan_model(name: str, step: LoadedStep) -> Plan:
    """Return the plan of a model that is no pipeline. It may have an input and an output of one name."""
    placed = place(name, step.signature, {}, {}, step)
    return Plan((PlannedStage(name, (placed,), tuple(placed.inputs), tuple(placed.outputs)),), step.signature)


def plan_pipeline(name: str, steps: Sequence[StepBinding], outputs: Sequence[str] | None) -> Plan:
    """Return the plan of a pipeline whose clients get the tensors `outputs`; None for all outputs of the last step.

    StartError if two steps give the same tensor, a step reads a tensor of a later one or one that does not fit, or nothing
    gives an output.
    """
    wanted = tuple(steps[-1].outputs.values() if outputs is None else outputs)
    signature = _signature(name, steps, wanted)
    stages: list[list[StepBinding]] = []
    for step in steps:
        if stages and _share_batches(stages[-1][-1], step) and not _reads_padding(stages[-1][0], step):
            stages[-1].append(step)
        else:
            stages.append([step])
    planned: list[PlannedStage] = []
    for index, stage in enumerate(stages):
        given = [tensor for step in stage for tensor in step.outputs.values()]
        read = dict.fromkeys(tensor for step in stage for tensor in step.inputs.values())
        later = {tensor for other in stages[index + 1 :] for step in other for tensor in step.inputs.values()}
        needed = tuple(tensor for tensor in given if tensor in later or tensor in wanted)
        if not needed:
            raise StartError(
                f"pipeline {name!r}: nothing reads the outputs of step {stage[-1].name!r}, {', '.join(given)}; leave the step "
                "out, or name one of them in `outputs`"
            )
        stage_name = _unused_name(stage, {other.name for other in planned})
        inputs = tuple(tensor for tensor in read if tensor not in given)
        planned.append(PlannedStage(stage_name, tuple(stage), inputs, needed))
    return Plan(tuple(planned), signature)


def _unused_name(stage: Sequence[StepBinding], used: Set[str]) -> str:
    """Return the name of a stage. A model that several stages run is numbered from the second on."""
    name = "+".join(step.name for step in stage)
    return next(one for number in count(1) if (one := f"{name}#{number}" if number > 1 else name) not in used)


def _share_batches(before: StepBinding, after: StepBinding) -> bool:
    first, second = before.step, after.step
    if first is None or second is None:
        return False
    one, other = first.settings, second.settings
    return (
        one.max_batch_size == other.max_batch_size
        and one.merges == other.merges
        and one.devices == other.devices
        and second.padding is None
        # A function on the CPU prepares the next batch while the device runs this one.
        and set(one.devices) == {"cpu"}
        # A function may return rows of different lengths, which need batches by length.
        and not (first.python and any(_varies(spec) for spec in before.signature.outputs))
    )


def _reads_padding(first: StepBinding, after: StepBinding) -> bool:
    """Whether a step would see the padding of the first step of the stage, in a tensor that both read or that it gives."""
    padding = first.step.padding if first.step is not None else None
    if padding is None or not isinstance(padding.inputs, Mapping):
        return False
    padded = {first.inputs[name] for name in padding.inputs}
    if isinstance(padding.outputs, Mapping):
        padded |= {first.outputs[name] for name in padding.outputs}
    return bool(padded & set(after.inputs.values())) or bool(padding.outputs)


def _varies(spec: TensorSpec) -> bool:
    return any(not isinstance(dim, int) for dim in spec.dims[1:])


def _signature(name: str, steps: Sequence[StepBinding], outputs: Sequence[str]) -> Signature:
    dag = dag_of([(step.inputs.values(), step.outputs.values()) for step in steps], ())
    producers = dag.producers
    if dag.clash is not None:
        tensor, number = dag.clash
        raise StartError(
            f"pipeline {name!r}: step {steps[number].name!r} gives the tensor {tensor!r}, which step "
            f"{steps[producers[tensor]].name!r} gives already; give it another name by step(..., outputs={{...}})"
        )
    given = {
        step.outputs[spec.name]: replace(spec, name=step.outputs[spec.name])
        for step in steps
        for spec in step.signature.outputs
    }
    inputs: dict[str, TensorSpec] = {}
    for number, step in enumerate(steps):
        for spec in step.signature.inputs:
            tensor, takes = step.inputs[spec.name], f"step {step.name!r} takes"
            if producers.get(tensor, -1) == number:
                raise StartError(
                    f"pipeline {name!r}: step {step.name!r} reads {tensor!r} and gives a tensor of the same name; give the "
                    "output another name by step(..., outputs={...})"
                )
            if producers.get(tensor, -1) > number:
                raise StartError(
                    f"pipeline {name!r}: step {step.name!r} reads {tensor!r}, which only a later step gives; change their order"
                )
            if tensor in producers:
                gives = f"step {steps[producers[tensor]].name!r} gives"
                _check_fit(name, tensor, gives, given[tensor], takes, spec)
            elif tensor in inputs:
                _check_fit(name, tensor, "one step takes", inputs[tensor], takes, spec)
                bounds = [each for each in (inputs[tensor].most_bytes, spec.most_bytes) if each]
                inputs[tensor] = replace(inputs[tensor], most_bytes=min(bounds, default=0))
            else:
                inputs[tensor] = replace(spec, name=tensor, optional=False)
    _check_names(name, steps, {*outputs}, given)
    for tensor in outputs:
        if tensor not in given:
            raise StartError(
                f"pipeline {name!r} has the output {tensor!r}, which no step gives; they give {', '.join(given)}"
            )
    # A step alone is a model, which may have outputs only.
    if not inputs and len(steps) > 1:
        raise StartError(f"pipeline {name!r} has no inputs; its first step must read one")
    return Signature(tuple(inputs.values()), tuple(given[tensor] for tensor in outputs))


def _check_names(
    name: str, steps: Sequence[StepBinding], outputs: Set[str], given: Mapping[str, TensorSpec]
) -> None:
    """Raise StartError if a later step reads what no step gives, while nothing reads an earlier output that it could mean."""
    read = {tensor for step in steps for tensor in step.inputs.values()} | outputs
    unread: dict[str, str] = {}
    for step in steps:
        for spec in step.signature.inputs if unread else ():
            tensor = step.inputs[spec.name]
            if tensor in given or spec.name not in step.unnamed:
                continue
            for other, giver in unread.items():
                if _fit(given[other], spec):
                    raise StartError(
                        f"pipeline {name!r}: step {step.name!r} reads {tensor!r}, which no step gives, and nothing reads {other!r} of step "
                        f"{giver!r}. If it means that, write step({step.name}, inputs={{{spec.name!r}: {other!r}}}); if clients "
                        f"shall give it, write inputs={{{spec.name!r}: {tensor!r}}}"
                    )
        unread.update({tensor: step.name for tensor in step.outputs.values() if tensor not in read})


def _fit(one: TensorSpec, other: TensorSpec) -> bool:
    fits = one.datatype == other.datatype and one.binary == other.binary
    if not fits or one.any_rank or other.any_rank:
        return fits
    return len(one.dims) == len(other.dims) and all(
        a == b or not isinstance(a, int) or not isinstance(b, int)
        for a, b in zip(one.dims, other.dims, strict=True)
    )


def _check_fit(
    pipeline: str, tensor: str, gives: str, one: TensorSpec, takes: str, other: TensorSpec
) -> None:
    if not _fit(one, other):
        raise StartError(
            f"pipeline {pipeline!r}, tensor {tensor!r}: {gives} {_type(one)}, but {takes} {_type(other)}; put a step between "
            "that converts it"
        )


def _type(spec: TensorSpec) -> str:
    name = spec.datatype.name if spec.binary or spec.datatype.name != "BYTES" else "STRING"
    return f"{name}{list(spec.shape)}"
