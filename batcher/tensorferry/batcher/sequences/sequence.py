"""Records of sequences: the tensors that a model hands on, bounds, and a sequence that lives."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tensorferry.batcher.errors import ModelOutputError
from tensorferry.batcher.request import Array, HeldTensor, Outcome, SequenceTag

State: TypeAlias = Array | HeldTensor


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A tensor that one request of a sequence hands on to the next: `output` of the one is `input` of the other.

    `initial` is what the first request gets, of numbers: one row, [1, ...], if the batcher's requests have rows.
    """

    input: str
    output: str
    initial: Array


class Control(enum.Enum):
    """What an input tells the model of a request: whether its sequence starts or ends, that the row is real, or the id."""

    START = "start"
    READY = "ready"
    END = "end"
    ID = "id"


@dataclass(frozen=True, slots=True, eq=False)
class ControlTensor:
    """An input that the batcher fills. `false` and `true` are its values; of an id, they are 0 or the empty string."""

    input: str
    control: Control
    false: Array
    true: Array

    def value(self, tag: SequenceTag) -> Array:
        """Return the value for a request. ValueError if an id does not fit."""
        if self.control is not Control.ID:
            flags = {Control.START: tag.start, Control.READY: True, Control.END: tag.end}
            return self.true if flags[self.control] else self.false
        if tag.id is None:
            return self.false
        if self.false.dtype.hasobject:
            return np.full_like(self.false, str(tag.id))
        if isinstance(tag.id, str):
            raise ValueError(f"sequence_id is {tag.id!r}; model input {self.input!r} takes an integer")
        try:
            return np.full_like(self.false, tag.id)
        except OverflowError:
            raise ValueError(
                f"sequence_id is {tag.id}; model input {self.input!r} takes {self.false.dtype.name}"
            ) from None


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Bounds of the sequences of one model. A sequence without a request for `idle_seconds` ends."""

    sequences: int = 10_000
    state_bytes: int = 1 << 30
    idle_seconds: float = 60.0


class EndReason(enum.Enum):
    """Why a sequence ended."""

    # Enum's own is pure Python and slow.
    __hash__ = object.__hash__

    ENDED = "ended"
    IDLE = "idle"
    STREAM = "stream"
    CANCELLED = "cancelled"
    FAILED = "failed"
    RESTARTED = "restarted"


class SequenceStatistics(NamedTuple):
    """Sequences of a model: how many live, their waiting requests and bytes of state, and how many ended by reason."""

    living: int
    waiting: int
    state_bytes: int
    started: int
    ended: Mapping[EndReason, int]


def state_bytes(states: tuple[State, ...]) -> int:
    """Return the bytes of states."""
    return sum(state.nbytes for state in states)


def is_held(row: Any) -> bool:
    """Return whether a request's part of an output is a HeldTensor."""
    return isinstance(row, list) and isinstance(row[0], HeldTensor)


def next_state(row: Any, like: StateTensor) -> State:
    """Return a copy of a request's part of an output, or what holds it. ValueError if it does not fit the input of the state."""
    state: State = row[0] if is_held(row) else np.array(row, copy=True, order="C")
    initial = like.initial
    if state.dtype != initial.dtype or len(state.shape) != initial.ndim:
        raise ValueError(
            f"output {like.output!r} is {state.dtype}{list(state.shape)}, but the state {like.input!r} is "
            f"{initial.dtype}{list(initial.shape)}"
        )
    return state


def shown_to(tag: SequenceTag, outcome: Outcome, state_outputs: Set[str]) -> Outcome:
    """Return an outcome with the states that the caller wants, as arrays, and without the others."""
    if outcome.outputs is None:
        return outcome
    try:
        if not isinstance(outcome.outputs, Mapping):
            raise ModelOutputError(
                "the model function's result is no dict; one with states returns outputs by name"
            )
        hidden = state_outputs - tag.wanted
        shown = {name: value for name, value in outcome.outputs.items() if name not in hidden}
        for name in state_outputs & shown.keys():
            if is_held(shown[name]):
                shown[name] = shown[name][0].numpy()
    except Exception as error:
        # It is no dict, or its device has failed.
        return outcome._replace(outputs=None, error=error)
    return outcome._replace(outputs=shown)
