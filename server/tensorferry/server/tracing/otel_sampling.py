"""Which requests have OpenTelemetry spans: by the specification's samplers, decided before anything is made.

The SDK's own samplers want a context, attributes and a name, which cost more to make than the rest of what a
request pays that has no spans.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TypeAlias

from tensorferry.server.errors import StartError
from tensorferry.server.telemetry.trace_context import TraceContext

SAMPLER = "OTEL_TRACES_SAMPLER"
ARGUMENT = "OTEL_TRACES_SAMPLER_ARG"

# The trace id of a request that has spans, given its caller's span; None for one that has none.
Sampler: TypeAlias = Callable[[TraceContext | None], int | None]

# By the last 64 bits of a trace's id, as the SDKs do: those of one trace then agree.
_BITS = (1 << 64) - 1
_PARENT_BASED = "parentbased_"
_NAMES = ("always_on", "always_off", "traceidratio")


def sampler_of(environment: Mapping[str, str]) -> Sampler:
    """The sampler that the standard variables name; StartError for what is none."""
    given = environment.get(SAMPLER, "").strip().lower() or f"{_PARENT_BASED}always_on"
    name = given.removeprefix(_PARENT_BASED)
    if name not in _NAMES:
        allowed = ", ".join((*_NAMES, *(_PARENT_BASED + each for each in _NAMES)))
        raise StartError(f"{SAMPLER} is {given!r}; it must be one of {allowed}")
    bound = {"always_on": _BITS + 1, "always_off": 0}.get(name)
    if bound is None:
        bound = round(_ratio(environment) * (_BITS + 1))
    return _sampler(bound, by_parent=given != name)


def _ratio(environment: Mapping[str, str]) -> float:
    text = environment.get(ARGUMENT, "").strip() or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise StartError(f"{ARGUMENT} is {text!r}; it must be a share of the traces, from 0 to 1")
    return ratio


def _sampler(bound: int, *, by_parent: bool) -> Sampler:
    bits = random.SystemRandom().getrandbits(64)
    # Ids need not be unpredictable; a system call for each would cost several times as much.
    new_id = random.Random(bits).getrandbits

    def sample(parent: TraceContext | None) -> int | None:
        if parent is not None:
            trace_id = int(parent.trace_id, 16)
            sampled = parent.sampled if by_parent else trace_id & _BITS < bound
        else:
            trace_id = new_id(128)
            # Zero is no id.
            sampled = trace_id & _BITS < bound and trace_id != 0
        return trace_id if sampled else None

    return sample
