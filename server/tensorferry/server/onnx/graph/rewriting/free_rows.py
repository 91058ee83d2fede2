"""A first axis fixed to 1: changes of a graph that make it variable, with the same answers for one row.

The changes only replace a 1 by a size that is 1 if there is one row. So the changed graph computes the same for one row as
the file does. For more rows, the analysis must prove that they are independent.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from tensorferry.server.onnx.graph.analysis import RowMixing, analysis_of
from tensorferry.server.onnx.graph.rewriting.changes import (
    FreedRows,
    NotFreed,
    callers_inputs,
    changed,
    is_one,
    read_changeable,
)
from tensorferry.server.onnx.graph.rewriting.changing_walk import ChangingWalk


def free_rows(path: Path) -> FreedRows:
    """Return the changes of a file with which its rows are proved independent; raise NotFreed if there are none.

    Nodes are changed, and inputs with defaults become constants, only if the graph is not proved without.
    """
    read = read_changeable(path)
    inputs = tuple(value.name for value in callers_inputs(read) if is_one(value))
    if not inputs:
        raise NotFreed("no input has a first axis of 1")
    starts = [FreedRows(inputs)]
    if len(callers_inputs(read)) < len(read.graph.input):
        starts.append(FreedRows(inputs, keeps_defaults=True))
    try:
        for start, fixes in itertools.product(starts, (False, True)):
            model = changed(read, start)
            walk = ChangingWalk(model, fixes=fixes)
            analysis = analysis_of(model, inputs, walk)
            if analysis.finding is RowMixing.SEPARATE:
                return replace(start, nodes=tuple(walk.changes))
    except Exception as error:
        raise NotFreed(f"the graph could not be analysed ({type(error).__name__}: {error})") from error
    raise NotFreed(*analysis.reasons)
