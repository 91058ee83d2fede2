"""Options of batching and scheduling, of sequences, and of the cache of answers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tensorferry.server.config.option import option
from tensorferry.server.config.parsers import (
    Parser,
    integer,
    integers,
    milliseconds,
    one_of,
    parse_pairs,
    positive_seconds,
    size,
    switch,
)


class PadLengths(NamedTuple):
    """The name of the axis to pad, and the lengths to pad to, ascending."""

    axis: str
    lengths: tuple[int, ...]


def _parse_batching(text: str) -> str:
    policy = one_of("proved", "tested", "trust", "prove").parse(text)
    return "tested" if policy == "prove" else policy


def _parse_pad_lengths(text: str) -> PadLengths:
    axis, _, listed = text.rpartition("=")
    lengths = tuple(int(length) for length in listed.split(","))
    if not axis or lengths[0] < 1 or any(b <= a for a, b in pairwise(lengths)):
        raise ValueError
    return PadLengths(axis, lengths)


_pad_lengths = Parser(
    _parse_pad_lengths,
    "the name of an axis and ascending lengths of at least 1, such as sequence=16,32,64",
    "axis with lengths",
    "AXIS=N,N,...",
)
_pad_values = Parser(
    parse_pairs,
    "a value for each input to pad, such as input_ids=0,attention_mask=0",
    "list of inputs with values",
    "INPUT=VALUE,...",
)


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
class BatchingOptions:
    """Options of batching and scheduling, all per model."""

    max_batch_size: int = option(
        32,
        integer(0, 1 << 20, unit="rows"),
        "most rows in a batch; 0 runs each request alone",
    )
    batch_rows: str = option(
        "pays",
        one_of("pays", "max"),
        "rows of a full batch; pays: at most as many as make a row cheaper, learned from the batches that run (not with "
        "--max-queue-delay-ms); max: always --max-batch-size",
    )
    batching: str = option(
        "tested",
        Parser(_parse_batching, "proved, tested or trust", "proved|tested|trust", "proved|tested|trust"),
        "which models are batched; proved: models whose graph shows that the rows of a batch are independent; tested "
        "(or prove): also models for which test runs show it; trust: all models, unchecked",
    )
    batching_rewrite: bool = option(
        True,
        switch,
        "batch a model whose batch axis is fixed to 1, or is not the first axis of each tensor, by a copy; only if the copy is "
        "proved, and its batches give the file's answers",
    )
    pad_lengths: PadLengths | None = option(
        None,
        _pad_lengths,
        "pad inputs to the next of these lengths along a variable axis, so that inputs of different lengths share a batch; on a "
        "CPU only as far as the longest row of a batch needs",
    )
    pad_values: tuple[tuple[str, str], ...] = option(
        (),
        _pad_values,
        "with --pad-lengths: the value with which each input is padded; can be given several times",
        separator=",",
    )
    max_queue_delay: float = option(
        0.0,
        milliseconds,
        "longest time from its arrival that a request waits for its batch to fill; 0: it waits only while the device is "
        "busy",
        flag="max-queue-delay-ms",
    )
    preferred_batch_sizes: tuple[int, ...] = option(
        (),
        integers("rows"),
        "sizes at which a batch starts before --max-queue-delay-ms is over, as in Triton; rarely useful",
    )
    priority_weights: tuple[int, ...] = option(
        (1,),
        integers(),
        "weight of each priority class, the highest class first; classes share rows by weight when all have requests; "
        "8,1 gives two classes",
    )
    default_priority: int = option(
        0,
        integer(0),
        "priority class of requests that name none; 1 is the highest, 0 stands for the lowest",
    )
    slo: float = option(
        0.0,
        milliseconds,
        "deadline of each request, counted from its arrival, unless it has an earlier one; 0: none",
        flag="slo-ms",
    )


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """Options of models that hand on state from one request of a sequence to the next, all per model."""

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


@dataclass(frozen=True, kw_only=True)
class CachingOptions:
    """Option of the cache of answers, per model."""

    cache: int = option(
        0,
        size(least=0),
        "most bytes of answers that are kept for each model, so that equal requests are not run again; 0: none",
    )
