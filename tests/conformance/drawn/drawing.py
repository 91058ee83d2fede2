"""A random graph while it is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tensorferry.server.onnx.graph.control_flow import captured_names

# Numbers of rows with which a graph is tried while it is drawn.
ROWS = 3
FLOAT = TensorProto.FLOAT


class Drawing:
    """A graph under construction: a node is kept if the graph still runs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        # Each value has a name, and its shape for `ROWS` rows.
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        rank = self.random.choice((2, 2, 3, 3, 4))
        # Sizes two and three are easily confused with the rows, or with each other.
        self.row = tuple(self.random.choice((1, 2, 3, 3, 4)) for _ in range(rank - 1))
        self.shapes["x"] = (ROWS, *self.row)

    def any(self) -> str:
        """Return a value, the latest most likely."""
        names = list(self.shapes)
        return names[-1] if self.random.random() < 0.6 else self.random.choice(names)

    def choice(self, *values: Any) -> Any:
        return self.random.choice(values)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def one_of(self, kinds: str, *inputs: str | Callable[[], str]) -> str:
        """Add a node of one of these kinds; inputs that are functions are drawn after the kind."""
        kind = self.choice(*kinds.split())
        return self.node(kind, *(one if isinstance(one, str) else one() for one in inputs))

    def constant(self, array: object, dtype: type = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=f"/{name}", **attributes))
        return name

    def axis(self, name: str) -> int:
        rank = len(self.shapes[name])
        return self.random.randrange(-rank, rank) if rank else 0

    def weights(self, *shape: int) -> str:
        return self.constant(np.random.default_rng(len(self.constants)).standard_normal(shape))

    def model(self, output: str) -> onnx.ModelProto:
        """Return the model of the nodes that the output depends on."""
        needed, nodes = {output}, list[onnx.NodeProto]()
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(node.input, captured_names(node))
                nodes.insert(0, node)
        graph = helper.make_graph(
            nodes,
            "composed",
            [helper.make_tensor_value_info("x", FLOAT, ["N", *self.row])],
            [helper.make_tensor_value_info(output, FLOAT, None)],
            self.constants,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
