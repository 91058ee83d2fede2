"""Random graphs of operators that move, merge and mix axes: none that mixes rows may be proved.

`python -m conformance.random_graphs --graphs 2000 --seed 1` prints how many were proved, tested and refused.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from conformance.batching import Model, compare_own_rows
from conformance.cases import Array
from onnx import TensorProto, helper, numpy_helper

from tensorferry.server.onnx_graph import RowMixing

_ROWS = 6
_DIMS = (1, 2, 3, 4, 6)
_MOST_ELEMENTS = 4000


@dataclass
class Draft:
    """A graph that grows by nodes which run; `arrays` are its tensors for six rows."""

    chance: random.Random
    x: Array
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)

    def constant(self, values: Any, kind: Any = np.int64) -> str:
        """The name of a new constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, kind), name))
        return name

    def model(self, outputs: list[str]) -> onnx.ModelProto:
        """The graph with these outputs."""
        shape = ["rows", *self.x.shape[1:]]
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            self.constants,
        )
        for output in graph.output:
            kind = self.arrays[output.name].dtype if output.name in self.arrays else np.dtype("f4")
            output.CopyFrom(
                helper.make_tensor_value_info(output.name, helper.np_dtype_to_tensor_dtype(kind), None)
            )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def grow(self, kind: str, inputs: list[str], **attributes: Any) -> bool:
        """Adds a node if it runs."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        for dtype in (np.float32, np.int64):
            self.arrays[name] = np.zeros(0, dtype)
            try:
                session = onnxruntime.InferenceSession(
                    self.model([name]).SerializeToString(), _quiet(), providers=["CPUExecutionProvider"]
                )
                made = session.run(None, {"x": self.x})[0]
            except Exception:
                continue
            if made.size and made.size <= _MOST_ELEMENTS:
                self.arrays[name] = made
                return True
        del self.arrays[name]
        self.nodes.pop()
        return False


def _quiet() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options


def random_model(seed: int, size: int) -> Model:
    """A model of `size` nodes."""
    chance = random.Random(seed)
    shape = (_ROWS, *(chance.choice(_DIMS) for _ in range(chance.randint(0, 3))))
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    draft = Draft(chance, x, arrays={"x": x})
    tries = 0
    while len(draft.nodes) < size and tries < 12 * size:
        tries += 1
        name = chance.choice(list(draft.arrays)[-3:])
        try:
            _add(draft, name, draft.arrays[name])
        except (IndexError, ValueError):
            continue
    last = list(draft.arrays)[-1] if draft.nodes else "x"
    if last == "x":
        draft.grow("Relu", ["x"])
        last = list(draft.arrays)[-1]
    return Model(f"seed {seed}", draft.model([last]), {"x": x})


def _add(draft: Draft, name: str, array: Array) -> None:
    chance = draft.chance
    rank = array.ndim
    axis = chance.randrange(rank) if rank else 0
    is_float = array.dtype == np.float32
    other = chance.choice(list(draft.arrays))
    kind = chance.choice(
        [
            "Relu",
            "Transpose",
            "Reshape",
            "ReshapeOf",
            "Flatten",
            "Reduce",
            "Softmax",
            "CumSum",
            "Add",
            "MatMul",
            "Gram",
            "Concat",
            "Split",
            "Slice",
            "Gather",
            "Unsqueeze",
            "Squeeze",
            "Expand",
            "ExpandOf",
            "Tile",
            "Einsum",
            "Count",
            "ArgMax",
            "Pick",
            "GatherElements",
            "GatherND",
            "Scatter",
            "Pad",
            "Weights",
            "Weights",
            "Bias",
            "Bias",
            "Range",
            "OwnRow",
            "OwnRow",
        ]
    )
    if kind == "Relu" and is_float:
        draft.grow(chance.choice(["Relu", "Tanh", "Abs"]), [name])
    elif kind == "Transpose":
        draft.grow("Transpose", [name], perm=chance.sample(range(rank), rank))
    elif kind == "Reshape":
        factors = _factors(chance, array.size)
        sizes = [
            0 if at < rank and size == array.shape[at] and chance.random() < 0.5 else size
            for at, size in enumerate(factors)
        ]
        sizes[chance.randrange(len(sizes))] = -1
        draft.grow("Reshape", [name, draft.constant(sizes)])
    elif kind == "ReshapeOf":
        draft.nodes.append(helper.make_node("Shape", [name], [f"s{len(draft.nodes)}"]))
        whole = draft.nodes[-1].output[0]
        parts = []
        for at in range(rank):
            part = f"{whole}.{at}"
            draft.nodes.append(helper.make_node("Gather", [whole, draft.constant([at])], [part]))
            parts.append(part)
        if rank > 1:
            first = chance.randrange(rank - 1)
            product = f"{whole}.p"
            draft.nodes.append(helper.make_node("Mul", parts[first : first + 2], [product]))
            parts[first : first + 2] = [product]
        if chance.random() < 0.3:
            chance.shuffle(parts)
        draft.nodes.append(helper.make_node("Concat", parts, [f"{whole}.t"], axis=0))
        draft.grow("Reshape", [name, f"{whole}.t"])
    elif kind == "Flatten":
        draft.grow("Flatten", [name], axis=chance.randint(0, rank))
    elif kind == "Reduce" and is_float:
        axes = chance.sample(range(rank), chance.randint(1, rank))
        draft.grow("ReduceMax", [name], axes=axes, keepdims=chance.randint(0, 1))
    elif kind == "Softmax" and is_float:
        draft.grow("Softmax", [name], axis=axis)
    elif kind == "CumSum":
        draft.grow("CumSum", [name, draft.constant(axis)])
    elif kind == "Add" and draft.arrays[other].dtype == array.dtype:
        draft.grow(chance.choice(["Add", "Mul"]), [name, other])
    elif kind == "MatMul" and is_float:
        draft.grow("MatMul", [name, other])
    elif kind == "Gram" and is_float and rank >= 2:
        perm = [*range(rank - 2), rank - 1, rank - 2]
        if draft.grow("Transpose", [name], perm=perm):
            draft.grow("MatMul", [name, list(draft.arrays)[-1]])
    elif kind == "Concat":
        draft.grow("Concat", [name, chance.choice([name, other])], axis=axis)
    elif kind == "Split" and array.shape[axis] % 2 == 0:
        out = f"h{len(draft.nodes)}"
        draft.nodes.append(helper.make_node("Split", [name], [out, f"{out}.b"], axis=axis))
        draft.grow("Identity", [chance.choice([out, f"{out}.b"])])
    elif kind == "Slice":
        bounds = [
            draft.constant([value])
            for value in (chance.choice([0, 0, 1]), chance.choice([1, 2, 2**31, -1]), axis)
        ]
        draft.grow("Slice", [name, *bounds, draft.constant([chance.choice([1, 1, 2])])])
    elif kind == "Gather":
        indices = [chance.randrange(array.shape[axis]) for _ in range(chance.randint(1, 3))]
        draft.grow(
            "Gather", [name, draft.constant(indices if chance.random() < 0.5 else indices[0])], axis=axis
        )
    elif kind == "Unsqueeze":
        draft.grow("Unsqueeze", [name, draft.constant([chance.randint(0, rank)])])
    elif kind == "Squeeze":
        ones = [at for at in range(rank) if array.shape[at] == 1]
        draft.grow("Squeeze", [name, draft.constant([chance.choice(ones)])])
    elif kind == "Expand":
        shape = [size if size != 1 else chance.choice([1, 2, 3]) for size in array.shape]
        draft.grow(
            "Expand", [name, draft.constant([1 if at == 0 else size for at, size in enumerate(shape)])]
        )
    elif kind == "ExpandOf":
        draft.nodes.append(helper.make_node("Shape", [other], [f"s{len(draft.nodes)}"]))
        draft.grow("Expand", [name, draft.nodes[-1].output[0]])
    elif kind == "Tile":
        draft.grow("Tile", [name, draft.constant([chance.choice([1, 1, 2]) for _ in range(rank)])])
    elif kind == "Einsum" and is_float and rank == 3:
        draft.grow(
            "Einsum",
            [name, name],
            equation=chance.choice(["abc,abd->acd", "abc,adc->abd", "abc,dbc->ad", "abc,abc->cb"]),
        )
    elif kind == "Count":
        out = f"n{len(draft.nodes)}"
        draft.nodes.append(helper.make_node("Shape", [name], [out]))
        draft.nodes.append(helper.make_node("Gather", [out, draft.constant(axis)], [f"{out}.n"]))
        draft.nodes.append(helper.make_node("Cast", [f"{out}.n"], [f"{out}.f"], to=TensorProto.FLOAT))
        draft.grow("Mul", [name, f"{out}.f"])
    elif kind == "ArgMax" and is_float:
        draft.grow("ArgMax", [name], axis=axis, keepdims=chance.randint(0, 1))
    elif kind == "Pick" and array.dtype == np.int64:
        draft.grow("Gather", [draft.constant(np.arange(40.0).reshape(20, 2), np.float32), name])
    elif kind == "GatherElements" and is_float and draft.grow("ArgMax", [name], axis=axis):
        draft.grow("GatherElements", [name, list(draft.arrays)[-1]], axis=chance.choice([axis, axis, 0]))
    elif (
        kind == "GatherND"
        and array.dtype == np.int64
        and draft.grow("Unsqueeze", [name, draft.constant([rank])])
    ):
        draft.grow("GatherND", [other, list(draft.arrays)[-1]], batch_dims=chance.randint(0, 2))
    elif kind == "Scatter" and is_float and draft.grow("ArgMax", [name], axis=axis):
        places = list(draft.arrays)[-1]
        if draft.grow("ReduceMax", [name], axes=[axis]):
            draft.grow(
                "ScatterElements",
                [name, places, list(draft.arrays)[-1]],
                axis=chance.choice([axis, axis, 0]),
            )
    elif kind == "Pad":
        pads = [0] * (2 * rank)
        pads[chance.randrange(2 * rank)] = 1
        draft.grow("Pad", [name, draft.constant(pads)])
    elif kind == "Weights" and is_float and rank:
        draft.grow(
            "MatMul", [name, draft.constant(np.ones((array.shape[-1], chance.choice(_DIMS))), np.float32)]
        )
    elif kind == "Bias" and is_float:
        shape = [chance.choice([1, size]) for size in array.shape[1:]]
        draft.grow("Add", [name, draft.constant(np.arange(float(np.prod(shape))).reshape(shape), np.float32)])
    elif kind == "OwnRow" and is_float and rank >= 2:
        _add_own_row(draft, name, axis, rank)
    elif kind == "Range":
        out = f"r{len(draft.nodes)}"
        draft.nodes.append(helper.make_node("Shape", [name], [out]))
        draft.nodes.append(helper.make_node("Gather", [out, draft.constant(axis)], [f"{out}.n"]))
        limits = [draft.constant(0), f"{out}.n", draft.constant(1)]
        if draft.grow("Range", limits) and is_float:
            draft.grow("Gather", [name, list(draft.arrays)[-1]], axis=axis)


def _add_own_row(draft: Draft, name: str, axis: int, rank: int) -> None:
    """As x[arange(n), i] for indices i along another axis: n is the size of an axis, which may be that of the rows."""
    out = f"o{len(draft.nodes)}"
    before = len(draft.nodes)
    bounds = [draft.constant(0), f"{out}.n", draft.constant(1)]
    draft.nodes += [
        helper.make_node("Shape", [name], [out]),
        helper.make_node("Gather", [out, draft.constant(axis % 2)], [f"{out}.n"]),
        helper.make_node("Range", bounds, [f"{out}.r"]),
    ]
    matrix = name
    if rank > 2:
        matrix = f"{out}.m"
        draft.nodes.append(
            helper.make_node("ReduceMax", [name], [matrix], axes=list(range(2, rank)), keepdims=0)
        )
    draft.nodes.append(helper.make_node("ArgMax", [matrix], [f"{out}.a"], axis=1 - axis % 2, keepdims=0))
    columns = []
    for column in (f"{out}.r", f"{out}.a"):
        columns.append(f"{column}.c")
        draft.nodes.append(helper.make_node("Unsqueeze", [column, draft.constant([-1])], [columns[-1]]))
    if draft.chance.random() < 0.3:
        columns.reverse()
    draft.nodes.append(helper.make_node("Concat", columns, [f"{out}.c"], axis=-1))
    if not draft.grow("GatherND", [name, f"{out}.c"]):
        del draft.nodes[before:]


def _factors(chance: random.Random, size: int) -> list[int]:
    found: list[int] = []
    while size > 1 and len(found) < 3:
        factor = chance.choice([one for one in range(1, size + 1) if size % one == 0])
        found.append(factor)
        size //= factor
    return [*found, size]


def main() -> int:
    """0 when no graph that mixes rows is proved."""
    parser = argparse.ArgumentParser(
        prog="conformance.random_graphs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--graphs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=6)
    arguments = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    wrong = 0
    for seed in range(arguments.seed, arguments.seed + arguments.graphs):
        found = compare_own_rows(random_model(seed, arguments.nodes))
        # A node may fail for several rows and still not mix them.
        failed = found.mixing is None or found.mixing.startswith("does not run")
        running = "does not run" if failed else "mixes" if found.mixing else "apart"
        counts[found.analysis.finding.name, running] += 1
        if found.analysis.finding is RowMixing.SEPARATE and running == "mixes":
            wrong += 1
            print(f"PROVED BUT MIXING  {found.name}: {found.mixing}")
        elif found.analysis.finding is not RowMixing.SEPARATE and running == "apart":
            print(f"{found.analysis.finding.name} but apart  {found.name}: {found.analysis.reasons[0]}")
    for key, count in sorted(counts.items()):
        print(f"{key[0]:9} {key[1]:13} {count}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
