"""`sequence_batching` of a configuration: states, control inputs and the time until an idle sequence ends.

What Triton's documentation says of each field (model_configuration.md, implicit_state_management.md) and of its two
strategies is mapped to sequences that share batches, with at most one request of each in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensorferry.batcher import Control, ControlTensor
from tensorferry.protos import model_config_pb2 as pb
from tensorferry.protos.tensors import DATATYPES, TensorError, decode_raw
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.pbtxt import datatype_of

_KINDS = {
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_START: Control.START,
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_READY: Control.READY,
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_END: Control.END,
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID: Control.ID,
}
_ID_DATATYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
# The directory of files with initial states, in that of the model.
_DIRECTORY = "initial_state"
# Triton's default.
_IDLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ConfiguredState:
    """A state: an input, the output that is its next value, and its first value of one request, without a batch axis.

    `initial` is None if the configuration gives no shape. `shown` says that clients get the output without asking for it.
    """

    input: str
    output: str
    initial: np.ndarray[Any, Any] | None
    shown: bool


@dataclass(frozen=True, slots=True)
class ConfiguredSequences:
    """The sequences of a configuration."""

    states: tuple[ConfiguredState, ...]
    controls: tuple[ControlTensor, ...]
    idle_seconds: float

    @property
    def filled(self) -> frozenset[str]:
        """The inputs that the server fills."""
        return frozenset(
            [*(state.input for state in self.states), *(control.input for control in self.controls)]
        )

    @property
    def hidden(self) -> frozenset[str]:
        """The outputs that clients get only if they ask for them."""
        return frozenset(state.output for state in self.states if not state.shown)


def configured_sequences(
    config: pb.ModelConfig, name: str, directory: Path | None
) -> ConfiguredSequences | None:
    """Return the sequences of a configuration; None if it has none. ModelConfigError says what is wrong.

    `name` is that of the model, and `directory` its directory in the repository.
    """
    if not config.HasField("sequence_batching"):
        return None
    given = config.sequence_batching
    what = f"sequence_batching of model {name!r}"
    listed = {output.name for output in config.output}
    states = tuple(
        ConfiguredState(
            state.input_name,
            state.output_name,
            _initial(state, f"{what}, state {state.input_name!r}", directory),
            state.output_name in listed,
        )
        for state in given.state
    )
    controls = tuple(
        _control(control, tensor.name, f"{what}, control input {tensor.name!r}")
        for tensor in given.control_input
        for control in tensor.control
    )
    filled = [*(state.input for state in states), *(control.input for control in controls)]
    for names, kind in ((filled, "input"), ([state.output for state in states], "output")):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ModelConfigError(f"{what} has the {kind} {twice!r} twice; give it one meaning")
    if not states and not controls:
        raise ModelConfigError(
            f"{what} has neither states nor control inputs, so the model could not tell sequences apart; declare its states, or leave "
            "sequence_batching out"
        )
    idle = given.max_sequence_idle_microseconds / 1e6 or _IDLE_SECONDS
    return ConfiguredSequences(states, controls, idle)


def with_batching(config: pb.ModelConfig) -> pb.ModelConfig:
    """Return a configuration with dynamic_batching in place of sequence_batching, and with the tensors that clients do not see.

    Thus the model is checked, and its requests share batches, like any other model.
    """
    given = config.sequence_batching
    changed = pb.ModelConfig()
    changed.CopyFrom(config)
    dynamic = changed.dynamic_batching
    dynamic.SetInParent()
    if given.HasField("oldest"):
        dynamic.preferred_batch_size.extend(given.oldest.preferred_batch_size)
        dynamic.max_queue_delay_microseconds = given.oldest.max_queue_delay_microseconds
    elif given.HasField("direct"):
        dynamic.max_queue_delay_microseconds = given.direct.max_queue_delay_microseconds
    for state in given.state:
        _add(changed.input, state.input_name, state.data_type, state.dims)
        _add(changed.output, state.output_name, state.data_type, state.dims)
    for tensor in given.control_input:
        _add(changed.input, tensor.name, _type_of(tensor.control), [1])
    return changed


def _add(tensors: Any, name: str, datatype: int, dims: Sequence[int]) -> None:
    """Add a tensor that is not listed. A list that is empty is completed from the file."""
    if tensors and all(tensor.name != name for tensor in tensors):
        tensors.add(name=name, data_type=datatype, dims=dims)


def _initial(state: Any, what: str, directory: Path | None) -> np.ndarray[Any, Any] | None:
    """Return the first value of a state, in which a variable dimension is 1; None if its shape is not given."""
    given = state.initial_state[0] if state.initial_state else None
    dims = [abs(dim) for dim in (given.dims if given is not None and given.dims else state.dims)]
    if not dims:
        return None
    datatype = DATATYPES[datatype_of(given.data_type if given is not None else state.data_type)]
    if given is None or given.WhichOneof("state_data") != "data_file":
        try:
            return np.zeros(dims, datatype.storage)
        except (ValueError, MemoryError) as error:
            raise ModelConfigError(f"{what} has dims {dims}; give those of the input ({error})") from None
    folder = (directory or Path()) / _DIRECTORY
    if "\0" in given.data_file:
        raise ModelConfigError(f"{what} begins with the file {given.data_file!r}, which is no file name")
    path = (folder / given.data_file).resolve()
    if directory is None or not path.is_relative_to(folder.resolve()):
        raise ModelConfigError(f"{what} begins with the file {given.data_file!r}, which is not in {folder}")
    try:
        return decode_raw(path.read_bytes(), datatype, dims)
    except (OSError, TensorError, ValueError) as error:
        raise ModelConfigError(f"{what} begins with the file {path}, which cannot be used: {error}") from None


def _control(given: Any, name: str, what: str) -> ControlTensor:
    """Return a control input; its values are without a batch axis."""
    kind = _KINDS[given.kind]
    if kind is Control.ID:
        datatype = datatype_of(given.data_type)
        if datatype not in _ID_DATATYPES:
            # As in Triton. Others cannot have every id.
            raise ModelConfigError(
                f"{what} has data_type TYPE_{datatype}; of CONTROL_SEQUENCE_CORRID it must be TYPE_UINT64, TYPE_INT64, TYPE_UINT32, "
                "TYPE_INT32 or TYPE_STRING"
            )
        none = np.zeros(1, DATATYPES[datatype].storage)
        if none.dtype.hasobject:
            none[:] = ""
        return ControlTensor(name, kind, none, none)
    values: Sequence[Any] = given.int32_false_true or given.fp32_false_true or given.bool_false_true
    if len(values) != 2:
        raise ModelConfigError(
            f"{what} has {len(values)} values; give int32_false_true, fp32_false_true or bool_false_true two: for false and for true"
        )
    storage: Any = np.int32 if given.int32_false_true else np.float32 if given.fp32_false_true else np.bool_
    return ControlTensor(name, kind, np.full(1, values[0], storage), np.full(1, values[1], storage))


def _type_of(controls: Sequence[Any]) -> int:
    """Return the datatype of a control input."""
    for control in controls:
        if control.kind == pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID:
            return int(control.data_type)
        if control.fp32_false_true:
            return int(pb.TYPE_FP32)
        if control.bool_false_true:
            return int(pb.TYPE_BOOL)
    return int(pb.TYPE_INT32)
