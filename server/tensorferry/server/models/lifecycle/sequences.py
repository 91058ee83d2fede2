"""Models that hand on state: the declared pairs of inputs and outputs, checked against the model's signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tensorferry.batcher import SequenceLimits, StateTensor
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.python.steps.loaded_step import DeclaredSequences, LoadedStep
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.serving import OnnxModel


def with_sequences(
    name: str, step: LoadedStep, declared: OnnxModel | None, config: ServerConfig
) -> LoadedStep:
    """Return a step whose declared states are no tensors of clients any more. StartError if they do not fit the model.

    `declared` is that of a Python file, `config` has the options of the model. Without a declared state the step is returned
    as it is.
    """
    pairs = tuple(declared.states.items()) if declared is not None and declared.states else config.state
    if not pairs:
        return step
    signature = step.signature
    inputs = {spec.name: spec for spec in signature.inputs}
    outputs = {spec.name: spec for spec in signature.outputs}
    batched = step.settings.max_batch_size > 0
    states = []
    for given, taken in pairs:
        _check_known(name, "input", given, inputs)
        _check_known(name, "output", taken, outputs)
        states.append(_state(name, inputs[given], outputs[taken], batched=batched))
    kept = without_states(signature, dict(pairs))
    if not any(spec.has_row_axis for spec in kept.inputs) and batched:
        raise StartError(
            f"model {name!r} has only states as inputs; leave one for the clients out of --state"
        )
    limits = SequenceLimits(config.max_sequences, config.max_state_bytes, config.sequence_idle)
    sequences = DeclaredSequences(tuple(states), limits)
    return replace(step, signature=kept, config=_described(step.config, states, limits), sequences=sequences)


def without_states(signature: Signature, states: Mapping[str, str]) -> Signature:
    """Return the signature that clients see: without the inputs of states, and with their outputs only on request."""
    hidden = set(states.values())
    return replace(
        signature,
        inputs=tuple(spec for spec in signature.inputs if spec.name not in states),
        outputs=tuple(spec for spec in signature.outputs if spec.name not in hidden),
        on_request=tuple(spec for spec in signature.outputs if spec.name in hidden),
    )


def _check_known(model: str, kind: str, name: str, known: Mapping[str, TensorSpec]) -> None:
    if name not in known:
        raise StartError(
            f"--state names the {kind} {name!r}, which model {model!r} does not have; it has {', '.join(known)}"
        )


def _state(model: str, given: TensorSpec, taken: TensorSpec, *, batched: bool) -> StateTensor:
    pair = f"--state {given.name}={taken.name} of model {model!r}"
    if given.datatype is not taken.datatype or given.datatype.name == "BYTES":
        raise StartError(
            f"{pair}: the input is {given.datatype.name} and the output {taken.datatype.name}; both must have one datatype of numbers"
        )
    if len(given.dims) != len(taken.dims) or any(
        isinstance(a, int) and isinstance(b, int) and a != b
        for a, b in zip(given.dims, taken.dims, strict=True)
    ):
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
    shape = [dim for dim in dims if isinstance(dim, int)]
    if len(shape) != len(dims):
        raise StartError(
            f"{pair}: the input has the variable shape {list(given.shape)}, so its first value is unknown; export the model with a "
            "fixed shape of its states"
        )
    return StateTensor(given.name, taken.name, np.zeros(shape, given.datatype.storage))


def _described(config: ModelConfig, states: Sequence[StateTensor], limits: SequenceLimits) -> ModelConfig:
    """Return the configuration as clients see it, with the states in its sequence_batching."""
    changed = ModelConfig()
    changed.CopyFrom(config)
    hidden = {name for state in states for name in (state.input, state.output)}
    tensors: Any
    for tensors in (changed.input, changed.output):
        kept = [tensor for tensor in tensors if tensor.name not in hidden]
        del tensors[:]
        tensors.extend(kept)
    sequences = changed.sequence_batching
    sequences.max_sequence_idle_microseconds = round(limits.idle_seconds * 1e6)
    for state in states:
        sequences.state.add(input_name=state.input, output_name=state.output)
    return changed
