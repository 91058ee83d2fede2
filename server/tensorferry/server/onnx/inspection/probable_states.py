"""Pairs of an input and an output of a model that look like a state: the output is the next value of the input."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product

from tensorferry.server.signature import Signature, TensorSpec

# What names of the two differ in, such as h and hn, past_key and present_key, cache and new_cache.
_AFFIX = re.compile(
    r"^(past|present|prev|previous|next|new|cached|old|initial|init|in|out|input|output|updated)[_.]|"
    r"[_.]?(in|out|next|new|prev|old|input|output|n|t|updated)$"
)


def probable_states(signature: Signature) -> Mapping[str, str]:
    """Return outputs by the input whose next value they seem to be: one that has its datatype, shape and name.

    Names may differ in a word before or after, such as `state` and `stateN`. A pair is left out if either could be another's.
    """
    pairs = [
        (given.name, taken.name)
        for given, taken in product(signature.inputs, signature.outputs)
        if _fit(given, taken) and _stem(given.name) == _stem(taken.name)
    ]
    inputs, outputs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return {given: taken for given, taken in pairs if inputs.count(given) == 1 == outputs.count(taken)}


def _fit(given: TensorSpec, taken: TensorSpec) -> bool:
    sizes = [
        (a, b)
        for a, b in zip(given.dims, taken.dims, strict=False)
        if isinstance(a, int) and isinstance(b, int)
    ]
    return (
        given.datatype is taken.datatype
        and len(given.dims) == len(taken.dims)
        and given.batch_axis == taken.batch_axis
        and all(a == b for a, b in sizes)
    )


def _stem(name: str) -> str:
    """Return a name without what marks it as the former or the next value."""
    stem = name.lower()
    while (shorter := _AFFIX.sub("", stem, count=1)) not in ("", stem):
        stem = shorter
    return stem
