"""The call of a declared function, in the server and in child processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from tensorferry.serving import DeclarationError, FunctionModel

# Takes the inputs of a batch, by name, and returns what the function returned; a list with what it returned for each row if it
# is a function of one row.
Call = Callable[[Mapping[str, Any]], Any]


class RequestFacts(NamedTuple):
    """What a request has beside its tensors: its id, and the parameters that only the model may know."""

    id: str
    parameters: Mapping[str, Any]


# Returns the facts of the requests in the batch that this context runs; of none where no client has sent it.
facts_of_requests: ContextVar[Callable[[], Sequence[RequestFacts]]] = ContextVar(
    "facts of requests", default=tuple
)


def bound_call(declared: FunctionModel) -> Call:
    """Return what calls a declared function; of a class, a new object after its `load`. Raises what the user's code raises.

    Inputs are passed by name if the function has parameters of their names, else in the declared order. They are read-only,
    because other steps, and other outputs of the same request, may be views of the same memory.
    """
    function: Any = declared.function
    if inspect.isclass(function):
        function = function()
        load = getattr(function, "load", None)
        if load is not None:
            load()
    names = list(declared.inputs)
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    by_name = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY)]
    with suppress(TypeError):
        # TypeError for a parameter without a default value that is no input.
        if any(one.kind is one.VAR_KEYWORD for one in parameters) or by_name >= set(names):
            signature.bind(**dict.fromkeys(names))
            return _by_row(declared, lambda inputs: function(**_read_only(inputs)))
        if len(positional) == len(names):
            signature.bind(*names)
            return _by_row(declared, lambda inputs: function(*map(_read_only(inputs).get, names)))
    raise DeclarationError(
        f"model {declared.name!r} has the inputs {names}, but its function takes {[one.name for one in parameters]}: name "
        "its parameters as the inputs, and give others a default value"
    )


def requests_of(inputs: Mapping[str, Any], rows: Sequence[int]) -> Iterator[Mapping[str, Any]]:
    """Yield the inputs of each request of a batch. `rows` has the rows of each; without any, the batch is one request."""
    if len(rows) < 2:
        yield inputs
        return
    for first, end in pairwise(accumulate(rows, initial=0)):
        yield {name: array[first:end] for name, array in inputs.items()}


def _read_only(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with views in place of arrays that can be written to."""
    views = dict(inputs)
    for name, array in inputs.items():
        if isinstance(array, np.ndarray) and array.flags.writeable:
            views[name] = array.view()
            views[name].flags.writeable = False
    return views


def _by_row(declared: FunctionModel, call: Call) -> Call:
    if declared.batched:
        return call
    first = next(iter(declared.inputs))
    return lambda inputs: [
        call({name: array[row] for name, array in inputs.items()}) for row in range(len(inputs[first]))
    ]
