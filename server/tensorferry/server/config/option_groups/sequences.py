"""Options of models that hand on state from one request of a sequence to the next."""

from __future__ import annotations

from dataclasses import dataclass

from tensorferry.server.config.option import option
from tensorferry.server.config.parsers import Parser, integer, parse_pairs, positive_seconds, size


def _parse_states(text: str) -> tuple[tuple[str, str], ...]:
    states = parse_pairs(text)
    outputs = {output for _, output in states}
    if "" in outputs or len(outputs) < len(states):
        raise ValueError
    return states


_states = Parser(
    _parse_states,
    "an input and the output that is its next value, such as state=stateN",
    "list of inputs with outputs",
    "INPUT=OUTPUT,...",
)


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """Options of sequences, all per model. A model has some if it declares states."""

    state: tuple[tuple[str, str], ...] = option(
        (),
        _states,
        "an input that gets what an output gave for the request before it in the same sequence; can be given several times",
        separator=",",
    )
    max_sequences: int = option(
        10_000,
        integer(1, unit="sequences"),
        "with --state: most living sequences of each model; further starts are rejected",
    )
    max_state_bytes: int = option(
        1 << 30,
        size(),
        "with --state: most bytes of states of each model; further starts, and requests whose states grow above it, are rejected",
    )
    sequence_idle: float = option(
        60.0,
        positive_seconds,
        "with --state: a sequence ends when no request came for this long",
        flag="sequence-idle-seconds",
    )
