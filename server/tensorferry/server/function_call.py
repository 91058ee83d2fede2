"""The call of a declared function, in the server and in child processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tensorferry.serving import DeclarationError, FunctionModel

# Takes the inputs of a batch, by name, and returns what the function returned.
Call = Callable[[Mapping[str, Any]], Any]


def bound_call(declared: FunctionModel) -> Call:
    """Return what calls a declared function; of a class, a new object after its `load`. Raises what the user's code raises.

    Inputs are passed by name if the function has parameters of their names, else in the declared order.
    """
    function: Any = declared.function
    if inspect.isclass(function):
        function = function()
        load = getattr(function, "load", None)
        if load is not None:
            load()
    names = list(declared.inputs)
    parameters = inspect.signature(function).parameters.values()
    by_name = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if any(one.kind is one.VAR_KEYWORD for one in parameters) or by_name >= set(names):
        return lambda inputs: function(**inputs)
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY)]
    if len(positional) == len(names):
        return lambda inputs: function(*(inputs[name] for name in names))
    raise DeclarationError(
        f"model {declared.name!r} has the inputs {names}, but its function takes {[one.name for one in parameters]}: name "
        "its parameters as the inputs"
    )
