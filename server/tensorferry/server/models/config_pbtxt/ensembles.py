"""Ensembles of config.pbtxt: their rules, which are Triton's, as are the texts of most errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias, TypeGuard

from tensorferry.batcher.pipeline.dag import dag_of
from tensorferry.protos import model_config_pb2 as pb
from tensorferry.protos.model_config_pb2 import ModelConfig, ModelEnsembling
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.io_mapping import check_tensor

PLATFORM = "ensemble"

_DYNAMIC = -1
# Limited because a client may send a configuration, and its check compares steps with each other.
_MOST_STEPS = 256
_Tensor: TypeAlias = pb.ModelInput | pb.ModelOutput


class NamedModel(NamedTuple):
    """A model that a step runs: its name, and its version, "" for the latest."""

    name: str
    version: str


def is_ensemble(config: ModelConfig | None) -> TypeGuard[ModelConfig]:
    """Whether a configuration describes an ensemble, which has no file of its own."""
    return config is not None and (config.platform == PLATFORM or config.HasField("ensemble_scheduling"))


def complete_ensemble(given: ModelConfig, name: str) -> ModelConfig:
    """Return a copy of an ensemble's configuration in which all open fields are filled in, checked by itself."""
    config = ModelConfig()
    config.CopyFrom(given)
    config.name = config.name or name
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    ordered_steps(config)
    return config


def named_models(config: ModelConfig) -> Sequence[NamedModel]:
    """Return the model of each step, in the order of the configuration."""
    # Triton's configurations say -1 for the latest version; 0 is an omitted field.
    return [
        NamedModel(step.model_name, str(step.model_version) if step.model_version > 0 else "")
        for step in config.ensemble_scheduling.step
    ]


def full_dims(tensor: _Tensor, *, batched: bool) -> tuple[int, ...]:
    """Return the shape of a tensor, with the axis of rows if it has one."""
    without_rows = isinstance(tensor, pb.ModelInput) and (tensor.is_shape_tensor or tensor.optional)
    return (_DYNAMIC, *tensor.dims) if batched and not without_rows else tuple(tensor.dims)


def ordered_steps(config: ModelConfig) -> Sequence[int]:
    """Return the numbers of the steps, each after those whose tensors it reads.

    ModelConfigError if the configuration by itself makes no ensemble: a tensor that nothing gives or reads, or a cycle.
    """
    name, steps = config.name, config.ensemble_scheduling.step
    for wrong, message in chain(_mistakes(config), _mistakes_of_tensors(config)):
        if wrong:
            raise ModelConfigError(message)
    inputs = [tensor.name for tensor in config.input]
    outputs = [tensor.name for tensor in config.output]
    dag = dag_of([(step.input_map.values(), step.output_map.values()) for step in steps], inputs)
    given = dag.producers.keys()
    read = {tensor for step in steps for tensor in step.input_map.values()}
    if dag.clash is not None:
        tensor, number = dag.clash
        if tensor in inputs:
            raise ModelConfigError(
                f"ensemble tensor '{tensor}' is an input of ensemble '{name}' and in the output map of step {number}; give one "
                "of them another name"
            )
        raise ModelConfigError(
            f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' step {number}"
        )
    for kind, own in (("input", inputs), ("output", outputs)):
        for tensor in own:
            if tensor not in given and tensor not in read:
                raise ModelConfigError(f"ensemble {kind} '{tensor}' for ensemble '{name}' is not used")
    for tensor in outputs:
        if tensor not in dag.available:
            cause = ""
            if dag.missing:
                cause = f": at least one of its depending tensors, '{dag.missing[0]}', is not connected"
            elif dag.stuck:
                names = ", ".join(f"'{steps[number].model_name}'" for number in dag.stuck)
                cause = f": the steps {names} wait for each other's tensors; remove the cycle"
            raise ModelConfigError(f"output '{tensor}' for ensemble '{name}' is not written{cause}")
        if tensor not in given:
            raise ModelConfigError(
                f"output '{tensor}' for ensemble '{name}' is one of its inputs, and no step gives it; leave it out, because the "
                "client has it"
            )
    for tensor in sorted((read | given) - set(outputs)):
        if tensor not in dag.available or tensor not in read:
            raise ModelConfigError(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")
    return dag.order


def _mistakes(config: ModelConfig) -> Iterator[tuple[object, str]]:
    """Yield, for each rule, whether the configuration breaks it, and the error."""
    name, steps, most = config.name, config.ensemble_scheduling.step, config.max_batch_size
    yield (
        not config.HasField("ensemble_scheduling"),
        f"ensemble scheduling must be set for ensemble {name} whose platform is {PLATFORM}",
    )
    yield (
        config.platform != PLATFORM,
        f"ensemble scheduling cannot be set for model '{name}' whose platform is not {PLATFORM}; add platform: \"{PLATFORM}\"",
    )
    yield config.instance_group, f"instance group should not be specified for ensemble '{name}'"
    yield config.HasField("optimization"), f"optimization should not be specified for ensemble '{name}'"
    yield config.model_warmup, f"model_warmup can not be specified for ensemble '{name}'"
    yield most < 0, f"'max_batch_size' must be non-negative for {name}, got {most}"
    yield not steps, f"must specify 'step' for ensemble '{name}'"
    yield (
        len(steps) > _MOST_STEPS,
        f"ensemble '{name}' has {len(steps)} steps; this server allows at most {_MOST_STEPS}",
    )
    for number, step in enumerate(steps):
        place = f"step {number} of ensemble '{name}'"
        for field in ("model_name", "input_map", "output_map"):
            yield not getattr(step, field), f"must specify '{field}' in {place}"
        yield (
            step.model_version < -1,
            f"model_version of {place} is {step.model_version}; it must be a version, or -1 for the latest",
        )
        yield (
            step.model_namespace,
            f"model_namespace of {place} is '{step.model_namespace}'; this server has one namespace, so leave it out",
        )


def _mistakes_of_tensors(config: ModelConfig) -> Iterator[tuple[object, str]]:
    name = config.name
    for kind, tensors in (("input", config.input), ("output", config.output)):
        seen = set[str]()
        for tensor in tensors:
            check_tensor(tensor, None, kind, name, config.max_batch_size > 0)
            yield (
                tensor.HasField("reshape"),
                f"{kind} '{tensor.name}' of ensemble '{name}' has a reshape, which this server does only for single models; "
                "give it to the model of the step, and the same dims here",
            )
            yield (
                isinstance(tensor, pb.ModelInput) and tensor.optional,
                f"input '{tensor.name}' of ensemble '{name}' is optional, but every step needs its inputs; leave 'optional' out",
            )
            yield (
                tensor.name in seen,
                f"the configuration of ensemble '{name}' has the {kind} '{tensor.name}' twice",
            )
            seen.add(tensor.name)


class _Found(NamedTuple):
    """What a tensor is, as a model declares it."""

    model: str
    datatype: str
    dims: tuple[int, ...]


def check_composing_models(config: ModelConfig, composing: Sequence[ModelConfig]) -> None:
    """Check an ensemble against the completed configurations of its steps' models; ModelConfigError names both sides."""
    name = config.name
    tensors: dict[str, _Found] = {}
    batched = config.max_batch_size > 0
    declared: list[_Tensor] = [*config.input, *config.output]
    for tensor in declared:
        tensors.setdefault(tensor.name, _found(name, tensor, batched))
    for step, model in zip(config.ensemble_scheduling.step, composing, strict=True):
        if 0 < model.max_batch_size < config.max_batch_size:
            raise ModelConfigError(
                f"ensemble {name} allows maximum batch size {config.max_batch_size}, but it contains model {step.model_name} "
                f"which only allows maximum batch size to be {model.max_batch_size}"
            )
        _check_mapping(name, step, model, tensors)


def _check_mapping(
    ensemble: str, step: ModelEnsembling.Step, model: ModelConfig, tensors: dict[str, _Found]
) -> None:
    where, batched = f"in ensemble {ensemble}, ", model.max_batch_size > 0
    inputs: dict[str, _Tensor] = {tensor.name: tensor for tensor in model.input}
    outputs: dict[str, _Tensor] = {tensor.name: tensor for tensor in model.output}
    sides = (
        ("is mapping to", "input", step.input_map, inputs),
        ("is mapped from", "output", step.output_map, outputs),
    )
    for verb, kind, mapped, known in sides:
        for own, tensor in mapped.items():
            if own not in known:
                raise ModelConfigError(
                    f"{where}ensemble tensor {tensor} {verb} non-existing {kind} {own} in model {step.model_name}; it has "
                    f"{', '.join(known)}"
                )
    for spec in model.input:
        if spec.name not in step.input_map and not spec.optional:
            raise ModelConfigError(
                f"{where}input {spec.name} in model {step.model_name} is not mapped to any ensemble tensors"
            )
    for _, _, mapped, known in sides:
        for own, tensor in mapped.items():
            found = _found(step.model_name, known[own], batched)
            _check_fit(ensemble, tensor, tensors.setdefault(tensor, found), found)


def _found(model: str, tensor: _Tensor, batched: bool) -> _Found:
    return _Found(model, pb.DataType.Name(tensor.data_type), full_dims(tensor, batched=batched))


def _check_fit(ensemble: str, tensor: str, one: _Found, other: _Found) -> None:
    where = f"in ensemble {ensemble}, ensemble tensor {tensor}: "
    if one.datatype != other.datatype:
        raise ModelConfigError(
            f"{where}inconsistent data type: {one.datatype} is inferred from model {one.model} while {other.datatype} is "
            f"inferred from model {other.model}"
        )
    fits = len(one.dims) == len(other.dims) and all(
        a == b or _DYNAMIC in (a, b) for a, b in zip(one.dims, other.dims, strict=True)
    )
    if not fits:
        raise ModelConfigError(
            f"{where}inconsistent shape: {_shape(one.dims)} is inferred from model {one.model} while {_shape(other.dims)} is "
            f"inferred from model {other.model} (-1 in front is the axis of rows of a model with max_batch_size)"
        )


def _shape(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"
