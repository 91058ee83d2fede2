"""OpenTelemetry's samplers, applied before anything else is created.

The SDK's own samplers need a context, attributes and a name. Creating these would be the greatest part of an unsampled
request's cost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TypeAlias

from tensorferry.server.errors import StartError
from tensorferry.server.observability.logs.trace_context import TraceContext

SAMPLER = "OTEL_TRACES_SAMPLER"
ARGUMENT = "OTEL_TRACES_SAMPLER_ARG"

# Function from the caller's span to the trace id of a sampled request; None if it is not sampled.
Sampler: TypeAlias = Callable[[TraceContext | None], int | None]

# The decision depends on the last 64 bits of the trace id, as in the SDKs, so all services agree.
_BITS = (1 << 64) - 1
_PARENT_BASED = "parentbased_"
_NAMES = ("always_on", "always_off", "traceidratio")


def sampler_of(environment: Mapping[str, str]) -> Sampler:
    """Return the sampler that the standard variables name. StartError for an unknown one."""
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
    # Ids need not be unpredictable, and a system call for each id would cost several times as much.
    new_id = random.Random(bits).getrandbits

    def sample(parent: TraceContext | None) -> int | None:
        if parent is not None:
            trace_id = int(parent.trace_id, 16)
            sampled = parent.sampled if by_parent else trace_id & _BITS < bound
        else:
            trace_id = new_id(128)
            # Zero is not a valid id.
            sampled = trace_id & _BITS < bound and trace_id != 0
        return trace_id if sampled else None

    return sample
