"""Options of batching and scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tensorferry.server.config.option import option
from tensorferry.server.config.parsers import Parser, integer, integers, milliseconds, one_of, switch


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


def _parse_pad_values(text: str) -> tuple[tuple[str, str], ...]:
    values: dict[str, str] = {}
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if not name or not equals or name in values:
            raise ValueError
        values[name] = value
    return tuple(values.items())


_pad_lengths = Parser(
    _parse_pad_lengths,
    "the name of an axis and ascending lengths of at least 1, such as sequence=16,32,64",
    "axis with lengths",
    "AXIS=N,N,...",
    format=lambda value: value and f"{value.axis}={','.join(map(str, value.lengths))}",
)
_pad_values = Parser(
    _parse_pad_values,
    "a value for each input to pad, such as input_ids=0,attention_mask=0",
    "list of inputs with values",
    "INPUT=VALUE,...",
    format=lambda value: ",".join(map("=".join, value)) or None,
)


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """Options of batching and scheduling."""

    max_batch_size: int = option(
        32,
        integer(0, 1 << 20, unit="rows"),
        "most rows in a batch; 0 runs each request alone",
        per_model=True,
    )
    batch_rows: str = option(
        "pays",
        one_of("pays", "max"),
        "rows of a full batch; pays: at most as many as make a row cheaper, learned from the batches that run (not with "
        "--max-queue-delay-ms); max: always --max-batch-size",
        per_model=True,
    )
    batching: str = option(
        "tested",
        Parser(_parse_batching, "proved, tested or trust", "proved|tested|trust", "proved|tested|trust"),
        "which models are batched; proved: models whose graph shows that the rows of a batch are independent; tested "
        "(or prove): also models for which test runs show it; trust: all models, unchecked",
        per_model=True,
    )
    batching_rewrite: bool = option(
        True,
        switch,
        "batch a model whose batch axis is fixed to 1, or is not the first axis of each tensor, by a copy; only if the copy is "
        "proved, and its batches give the file's answers",
        per_model=True,
    )
    pad_lengths: PadLengths | None = option(
        None,
        _pad_lengths,
        "pad inputs to the next of these lengths along a variable axis, so that inputs of different lengths share a batch; on a "
        "CPU only as far as the longest row of a batch needs",
        per_model=True,
    )
    pad_values: tuple[tuple[str, str], ...] = option(
        (),
        _pad_values,
        "with --pad-lengths: the value with which each input is padded; can be given several times",
        separator=",",
        per_model=True,
    )
    max_queue_delay: float = option(
        0.0,
        milliseconds,
        "longest time from its arrival that a request waits for its batch to fill; 0: it waits only while the device is "
        "busy",
        flag="max-queue-delay-ms",
        per_model=True,
    )
    preferred_batch_sizes: tuple[int, ...] = option(
        (),
        integers("rows"),
        "sizes at which a batch starts before --max-queue-delay-ms is over, as in Triton; rarely useful",
        per_model=True,
    )
    priority_weights: tuple[int, ...] = option(
        (1,),
        integers(),
        "weight of each priority class, the highest class first; classes share rows by weight when all have requests; "
        "8,1 gives two classes",
        per_model=True,
    )
    default_priority: int = option(
        0,
        integer(0),
        "priority class of requests that name none; 1 is the highest, 0 stands for the lowest",
        per_model=True,
    )
    slo: float = option(
        0.0,
        milliseconds,
        "deadline of each request, counted from its arrival, unless it has an earlier one; 0: none",
        flag="slo-ms",
        per_model=True,
    )
