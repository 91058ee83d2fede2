"""`make batching-evidence`: copies of random graphs whose first axis is fixed to 1, compared with the files.

Prints how many graphs have a copy that is proved; the exit status is 1 if the batches of one do not give the file's answers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from conformance.cases import Array, session_of
from conformance.drawn.compositions import composed
from conformance.drawn.drawing import ROWS
from onnx import numpy_helper

from tensorferry.server.onnx.graph.rewriting.batch_first import batch_first
from tensorferry.server.onnx.graph.rewriting.changes import FreedRows, NotFreed, write_freed
from tensorferry.server.onnx.graph.rewriting.free_rows import free_rows

REFUSED, AS_IT_IS, CHANGED = "refused", "proved", "proved with changed nodes"


def fixed_to_one_row(model: onnx.ModelProto, path: Path) -> bool:
    """Write a graph for one row as exporters do, with constant shapes; return whether it runs with one."""
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.int64:
            tensor.CopyFrom(numpy_helper.from_array(np.where(array == ROWS, 1, array), tensor.name))
        elif array.ndim and len(array) == ROWS:
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array[:1]), tensor.name))
    (declared,) = model.graph.input
    declared.type.tensor_type.shape.dim[0].dim_value = 1
    model.graph.output[0].type.tensor_type.ClearField("shape")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    try:
        own = onnxruntime.InferenceSession(model.SerializeToString(), options)
        own.run(None, {"x": np.ones(own.get_inputs()[0].shape, np.float32)})
    except Exception:  # ONNX Runtime has no error types of its own
        return False
    return True


def changes_of(path: Path) -> FreedRows | None:
    """Return the changes with which a file is served; None if it is served as it is."""
    for change in (free_rows, partial(batch_first, has_time=lambda: True)):
        try:
            return change(path)
        except NotFreed:
            continue
    return None


def wrong_answers(path: Path, freed: FreedRows, seed: int) -> int:
    """Return how many of three rows get another answer from the copy, alone or together, than from the file."""
    copy = path.with_suffix(".copy.onnx")
    write_freed(path, freed, copy)
    own, free = session_of(onnx.load(path)), session_of(onnx.load(copy))
    axes = {moved.name: moved.axis for moved in freed.axes}
    (given,), (made,) = own.get_inputs(), own.get_outputs()
    generator = np.random.default_rng(seed)
    rows = [generator.standard_normal(given.shape).astype(np.float32) for _ in range(ROWS)]
    first = [np.moveaxis(row, axes.get(given.name, 0), 0) for row in rows]
    together = free.run(None, {given.name: np.concatenate(first)})[0]
    wrong = 0
    for at, row in enumerate(rows):
        right = own.run(None, {given.name: row})[0]
        answers = (together[at : at + 1], free.run(None, {given.name: first[at]})[0])
        placed = [np.moveaxis(answer, 0, axes.get(made.name, 0)) for answer in answers]
        wrong += not all(_same(answer, right) for answer in placed)
    return wrong


def _same(answer: Array, right: Array) -> bool:
    return answer.shape == right.shape and np.allclose(answer, right, 1e-3, 1e-4, equal_nan=True)


def compare_copies(first: int, count: int, folder: Path) -> tuple[Mapping[str, int], Sequence[int]]:
    """Return how many of `count` graphs have which kind of copy, and the seeds of those with wrong answers."""
    kinds: Counter[str] = Counter()
    wrong = []
    for seed in range(first, first + count):
        drawn, path = composed(seed), folder / f"{seed}.onnx"
        if drawn is None or not fixed_to_one_row(drawn.model, path):
            continue
        freed = changes_of(path)
        if freed is None:
            kinds[REFUSED] += 1
            continue
        kinds[CHANGED if freed.nodes else AS_IT_IS] += 1
        if wrong_answers(path, freed, seed):
            wrong.append(seed)
    return kinds, wrong


def main() -> int:
    """Return 0 if no copy gives a wrong answer."""
    parser = argparse.ArgumentParser(prog="conformance.drawn.one_row")
    parser.add_argument("--count", type=int, default=2000, help="graphs that are drawn")
    parser.add_argument("--seed", type=int, default=1, help="number of the first")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="one-row-"))
    kinds, wrong = compare_copies(arguments.seed, arguments.count, folder)
    for kind in (AS_IT_IS, CHANGED, REFUSED):
        print(f"{kind}: {kinds[kind]} random graphs of one row")
    print(f"wrong answers: {wrong or 'none'}; the graphs are in {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
