"""Models that hand on state: the declared pairs of inputs and outputs, checked against the model's signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tensorferry.batcher import ControlTensor, SequenceLimits, StateTensor
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.sequence_batching import (
    ConfiguredSequences,
    ConfiguredState,
    configured_sequences,
)
from tensorferry.server.python.steps.loaded_step import DeclaredSequences, LoadedStep
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.serving import OnnxModel


def with_sequences(
    source: ModelSource, step: LoadedStep, declared: OnnxModel | None, config: ServerConfig
) -> LoadedStep:
    """Return a step whose states and control inputs are no tensors of clients any more. StartError if they do not fit the model.

    `declared` is that of a Python file, `config` has the options of the model. Without sequences the step is returned as it is.
    """
    name = source.name
    configured = (
        None if source.config is None else configured_sequences(source.config, name, source.directory)
    )
    pairs = tuple(declared.states.items()) if declared is not None and declared.states else config.state
    if configured is not None and pairs:
        raise StartError(
            f"model {name!r} has --state, and its config.pbtxt has sequence_batching; give one of both"
        )
    if configured is None:
        if not pairs:
            return step
        states = tuple(ConfiguredState(given, taken, None, shown=False) for given, taken in pairs)
        configured = ConfiguredSequences(states, (), config.sequence_idle)
    signature = step.signature
    inputs = {spec.name: spec for spec in signature.inputs}
    outputs = {spec.name: spec for spec in signature.outputs}
    batched = step.settings.max_batch_size > 0
    what = "--state" if pairs else "sequence_batching"
    for state in configured.states:
        _check_known(name, what, "input", state.input, inputs)
        _check_known(name, what, "output", state.output, outputs)
    tensors = [
        _state(
            f"{what} {state.input}={state.output} of model {name!r}", state, inputs, outputs, batched=batched
        )
        for state in configured.states
    ]
    controls = configured.controls
    if batched:
        controls = tuple(replace(each, false=each.false[None], true=each.true[None]) for each in controls)
    for control in controls:
        _check_known(name, what, "input", control.input, inputs)
        _check_control(name, control, inputs[control.input])
    kept = _for_clients(signature, configured)
    if not any(spec.has_row_axis for spec in kept.inputs) and batched:
        raise StartError(f"model {name!r} has only states as inputs; leave one for the clients out of {what}")
    if not kept.outputs:
        raise StartError(
            f"model {name!r} has only states as outputs; leave one for the clients out of {what}"
        )
    limits = SequenceLimits(config.max_sequences, config.max_state_bytes, configured.idle_seconds)
    sequences = DeclaredSequences(tuple(tensors), controls, limits)
    described = _config_for_clients(step.config, source, configured)
    return replace(step, signature=kept, config=described, sequences=sequences)


def _for_clients(signature: Signature, sequences: ConfiguredSequences) -> Signature:
    """Return the signature that clients see: without the inputs that the server fills, and with most states only on request."""
    filled, hidden = sequences.filled, sequences.hidden
    return replace(
        signature,
        inputs=tuple(spec for spec in signature.inputs if spec.name not in filled),
        outputs=tuple(spec for spec in signature.outputs if spec.name not in hidden),
        on_request=tuple(spec for spec in signature.outputs if spec.name in hidden),
    )


def _check_known(model: str, what: str, kind: str, name: str, known: Mapping[str, TensorSpec]) -> None:
    if name not in known:
        raise StartError(
            f"{what} names the {kind} {name!r}, which model {model!r} does not have; it has {', '.join(known)}"
        )


def _check_control(model: str, control: ControlTensor, spec: TensorSpec) -> None:
    if control.false.dtype != spec.datatype.storage or len(spec.dims) != control.false.ndim:
        raise StartError(
            f"sequence_batching of model {model!r}: control input {spec.name!r} is {spec.datatype.name}{list(spec.shape)} in the "
            f"file, but {control.false.dtype.name}{list(control.false.shape)} in the configuration; each row must have one value"
        )


def _state(
    pair: str,
    state: ConfiguredState,
    inputs: Mapping[str, TensorSpec],
    outputs: Mapping[str, TensorSpec],
    *,
    batched: bool,
) -> StateTensor:
    given, taken = inputs[state.input], outputs[state.output]
    if given.datatype is not taken.datatype or given.datatype.name == "BYTES":
        raise StartError(
            f"{pair}: the input is {given.datatype.name} and the output {taken.datatype.name}; both must have one datatype of numbers"
        )
    if not _fits(given.dims, taken.dims):
        raise StartError(
            f"{pair}: the input is {list(given.shape)} and the output {list(taken.shape)}; both must have one shape"
        )
    if batched and given.has_row_axis != taken.has_row_axis:
        raise StartError(f"{pair}: only one of the two has the axis of the rows")
    if batched and not given.has_row_axis:
        raise StartError(
            f"{pair}: neither has an axis of rows, so sequences cannot share batches; give --max-batch-size 0"
        )
    dims = (1, *given.dims[1:]) if batched else given.dims
    if state.initial is not None:
        initial = state.initial[None] if batched else state.initial
        if initial.dtype != given.datatype.storage or not _fits(initial.shape, dims):
            raise StartError(
                f"{pair}: its first value is {initial.dtype.name}{list(initial.shape)}, but the input is {given.datatype.name}"
                f"{list(given.shape)}"
            )
        return StateTensor(given.name, taken.name, initial)
    shape = [dim for dim in dims if isinstance(dim, int)]
    if len(shape) != len(dims):
        raise StartError(
            f"{pair}: the input has the variable shape {list(given.shape)}, so its first value is unknown; export the model with a "
            "fixed shape of its states"
        )
    return StateTensor(given.name, taken.name, np.zeros(shape, given.datatype.storage))


def _fits(dims: Sequence[int | str], others: Sequence[int | str]) -> bool:
    """Return whether tensors with these dimensions can have one shape."""
    return len(dims) == len(others) and all(
        isinstance(one, str) or isinstance(other, str) or one == other
        for one, other in zip(dims, others, strict=True)
    )


def _config_for_clients(
    config: ModelConfig, source: ModelSource, sequences: ConfiguredSequences
) -> ModelConfig:
    """Return a completed configuration as clients see it: without the tensors that the server fills."""
    changed = ModelConfig()
    changed.CopyFrom(config)
    tensors: Any
    for tensors, hidden in ((changed.input, sequences.filled), (changed.output, sequences.hidden)):
        kept = [tensor for tensor in tensors if tensor.name not in hidden]
        del tensors[:]
        tensors.extend(kept)
    if source.config is not None and source.config.HasField("sequence_batching"):
        changed.sequence_batching.CopyFrom(source.config.sequence_batching)
        return changed
    changed.sequence_batching.max_sequence_idle_microseconds = round(sequences.idle_seconds * 1e6)
    for state in sequences.states:
        changed.sequence_batching.state.add(input_name=state.input, output_name=state.output)
    return changed
