"""Planning of a pipeline: which steps form a stage, what each stage reads and gives, and what clients see.

Steps that follow each other form one stage if one batch can run through them: they have the same largest batch and the same
number of instances, let requests share batches alike, run on the same kind of device, and the later one is not padded and sees no padding of the earlier ones. A
stage has one batcher; between stages batches are formed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count

from tensorferry.server.errors import StartError
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.server.steps.loaded_step import LoadedStep
from tensorferry.server.steps.named_model import UsedModel


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A step of a pipeline.

    `inputs` and `outputs` map the step's names to the pipeline's tensors. The step is loaded here as `step`, or `used` is
    another model of the server, which has its own batcher.
    """

    name: str
    signature: Signature
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    step: LoadedStep | None = None
    used: UsedModel | None = None

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
    steps: tuple[PlacedStep, ...]
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
    used: UsedModel | None = None,
) -> PlacedStep:
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
    return PlacedStep(
        name,
        signature,
        {tensor: inputs.get(tensor, tensor) for tensor in own["input"]},
        {tensor: outputs.get(tensor, tensor) for tensor in own["output"]},
        step,
        used,
    )


def plan_pipeline(name: str, steps: Sequence[PlacedStep], outputs: Sequence[str] | None) -> Plan:
    """Return the plan of a pipeline whose clients get the tensors `outputs`; None for all outputs of the last step.

    StartError if two steps give the same tensor, a step reads a tensor of a later one or one that does not fit, or nothing
    gives an output.
    """
    wanted = tuple(steps[-1].outputs.values() if outputs is None else outputs)
    signature = _signature(name, steps, wanted)
    stages: list[list[PlacedStep]] = []
    for step in steps:
        if stages and _share_batches(stages[-1][-1], step) and not _reads_padding(stages[-1][0], step):
            stages[-1].append(step)
        else:
            stages.append([step])
    planned: list[PlannedStage] = []
    for index, stage in enumerate(stages):
        given = [tensor for step in stage for tensor in step.outputs.values()]
        read_later = {
            tensor for later in stages[index + 1 :] for step in later for tensor in step.inputs.values()
        }
        read = dict.fromkeys(
            tensor for step in stage for tensor in step.inputs.values() if tensor not in given
        )
        needed = tuple(tensor for tensor in given if tensor in read_later or tensor in wanted)
        if not needed:
            raise StartError(
                f"pipeline {name!r}: nothing reads the outputs of step {stage[-1].name!r}, {', '.join(given)}; leave the step "
                "out, or name one of them in `outputs`"
            )
        stage_name = _unused_name(stage, {other.name for other in planned})
        planned.append(PlannedStage(stage_name, tuple(stage), tuple(read), needed))
    return Plan(tuple(planned), signature)


def _unused_name(stage: Sequence[PlacedStep], used: Set[str]) -> str:
    """Return the name of a stage. A model that several stages run is numbered from the second on."""
    name = "+".join(step.name for step in stage)
    return next(one for number in count(1) if (one := f"{name}#{number}" if number > 1 else name) not in used)


def _share_batches(before: PlacedStep, after: PlacedStep) -> bool:
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


def _reads_padding(first: PlacedStep, after: PlacedStep) -> bool:
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


def _signature(name: str, steps: Sequence[PlacedStep], outputs: Sequence[str]) -> Signature:
    inputs: dict[str, TensorSpec] = {}
    given: dict[str, tuple[PlacedStep, TensorSpec]] = {}
    all_outputs = {tensor for step in steps for tensor in step.outputs.values()}
    for step in steps:
        for spec in step.signature.inputs:
            tensor = step.inputs[spec.name]
            if tensor in given:
                giver, other = given[tensor]
                _check_fit(
                    name, tensor, f"step {giver.name!r} gives", other, f"step {step.name!r} takes", spec
                )
            elif tensor in all_outputs:
                raise StartError(
                    f"pipeline {name!r}: step {step.name!r} reads {tensor!r}, which only a later step gives; change their order"
                )
            elif tensor in inputs:
                _check_fit(name, tensor, "one step takes", inputs[tensor], f"step {step.name!r} takes", spec)
                bounds = [each for each in (inputs[tensor].most_bytes, spec.most_bytes) if each]
                inputs[tensor] = replace(inputs[tensor], most_bytes=min(bounds, default=0))
            else:
                inputs[tensor] = replace(spec, name=tensor, optional=False)
        for spec in step.signature.outputs:
            tensor = step.outputs[spec.name]
            if tensor in given:
                raise StartError(
                    f"pipeline {name!r}: step {step.name!r} gives the tensor {tensor!r}, which step {given[tensor][0].name!r} "
                    "gives already; give it another name by step(..., outputs={...})"
                )
            given[tensor] = step, replace(spec, name=tensor)
    for tensor in outputs:
        if tensor not in given:
            raise StartError(
                f"pipeline {name!r} has the output {tensor!r}, which no step gives; they give {', '.join(given)}"
            )
    # A step alone is a model, which may have outputs only.
    if not inputs and len(steps) > 1:
        raise StartError(f"pipeline {name!r} has no inputs; its first step must read one")
    return Signature(tuple(inputs.values()), tuple(given[tensor][1] for tensor in outputs))


def _check_fit(
    pipeline: str, tensor: str, gives: str, one: TensorSpec, takes: str, other: TensorSpec
) -> None:
    fits = one.datatype == other.datatype and one.binary == other.binary
    if fits and not one.any_rank and not other.any_rank:
        fits = len(one.dims) == len(other.dims) and all(
            a == b or not isinstance(a, int) or not isinstance(b, int)
            for a, b in zip(one.dims, other.dims, strict=True)
        )
    if not fits:
        raise StartError(
            f"pipeline {pipeline!r}, tensor {tensor!r}: {gives} {_type(one)}, but {takes} {_type(other)}; put a step between "
            "that converts it"
        )


def _type(spec: TensorSpec) -> str:
    name = spec.datatype.name if spec.binary or spec.datatype.name != "BYTES" else "STRING"
    return f"{name}{list(spec.shape)}"
