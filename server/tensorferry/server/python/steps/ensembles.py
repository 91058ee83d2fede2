"""Plan of an ensemble: its steps, each run by another model of the server, and the signature that its configuration declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tensorferry.protos import model_config_pb2 as pb
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.models.config_pbtxt.ensembles import (
    check_composing_models,
    full_dims,
    named_models,
    ordered_steps,
)
from tensorferry.server.python.steps.named_model import ModelReference, restricted
from tensorferry.server.python.steps.planning import Plan, StepBinding, plan_pipeline
from tensorferry.server.signature import Signature, TensorSpec


class ComposingModel(NamedTuple):
    """A model of an ensemble: its completed configuration, its signature, and whether axis 0 counts rows."""

    config: ModelConfig
    signature: Signature
    batched: bool


def plan_ensemble(config: ModelConfig, composing: Sequence[ComposingModel]) -> Plan:
    """Return the plan of an ensemble. `composing` has the model of each step.

    ModelConfigError if the models do not fit together, by Triton's rules; StartError for what only this server needs.
    """
    ordered = ordered_steps(config)
    check_composing_models(config, [model.config for model in composing])
    steps = config.ensemble_scheduling.step
    models = named_models(config)
    placed = []
    for number in ordered:
        step, (name, version) = steps[number], models[number]
        signature = restricted(composing[number].signature, step.input_map, step.output_map)
        used = ModelReference(name, version, signature, composing[number].batched)
        inputs = {spec.name: step.input_map[spec.name] for spec in signature.inputs}
        outputs = {spec.name: step.output_map[spec.name] for spec in signature.outputs}
        placed.append(StepBinding(name, signature, inputs, outputs, used=used))
    plan = plan_pipeline(config.name, placed, [tensor.name for tensor in config.output])
    return replace(plan, signature=_declared(config, plan.signature))


def _declared(config: ModelConfig, found: Signature) -> Signature:
    """Return the signature in the order, and with the shapes, of the configuration."""
    batched = config.max_batch_size > 0
    inputs = {spec.name: spec for spec in found.inputs}
    outputs = {spec.name: spec for spec in found.outputs}
    return Signature(
        tuple(_spec(tensor, inputs[tensor.name], batched=batched) for tensor in config.input),
        tuple(_spec(tensor, outputs[tensor.name], batched=batched) for tensor in config.output),
    )


def _spec(tensor: pb.ModelInput | pb.ModelOutput, found: TensorSpec, *, batched: bool) -> TensorSpec:
    shape = full_dims(tensor, batched=batched)
    # Dimensions that the configuration leaves open keep their names in the models.
    known = found.dims if len(found.dims) == len(shape) else ("",) * len(shape)
    dims = tuple(
        size if size >= 0 else name if isinstance(name, str) else ""
        for size, name in zip(shape, known, strict=True)
    )
    return replace(found, dims=dims, any_rank=False, optional=False, counts_rows=False)
