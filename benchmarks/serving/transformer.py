"""Sentence encoder of MiniLM's shape with seeded weights: token ids to the mean of the last layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from serving.weights import Weights

LAYERS, HIDDEN, HEADS, INNER, SEQUENCE, VOCABULARY = 6, 384, 12, 1536, 32, 2000


class _Graph:
    """Nodes of the graph, in order; each method adds some and returns the name of the result."""

    def __init__(self, weights: Weights) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights = weights
        self.split = weights.constant("split", np.array([0, SEQUENCE, HEADS, HIDDEN // HEADS]))
        self.joined = weights.constant("joined", np.array([0, SEQUENCE, HIDDEN]))
        self.scale = weights.constant("scale", np.float32(1 / math.sqrt(HIDDEN // HEADS)))
        self.sqrt_half = weights.constant("sqrt_half", np.float32(math.sqrt(0.5)))
        self.half = weights.constant("half", np.float32(0.5))
        self.one = weights.constant("one", np.float32(1))

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def linear(self, x: str, name: str, inputs: int, outputs: int) -> str:
        weight = self.weights.normal(f"{name}_w", (inputs, outputs))
        bias = self.weights.normal(f"{name}_b", (outputs,), 0.01)
        return self.add("Add", self.add("MatMul", x, weight), bias)

    def normalized(self, x: str, name: str) -> str:
        gain = self.weights.constant(f"{name}_gain", np.ones(HIDDEN, np.float32))
        bias = self.weights.constant(f"{name}_bias", np.zeros(HIDDEN, np.float32))
        return self.add("LayerNormalization", x, gain, bias, axis=-1)

    def heads(self, x: str, name: str, order: list[int]) -> str:
        parts = self.add("Reshape", self.linear(x, name, HIDDEN, HIDDEN), self.split)
        return self.add("Transpose", parts, perm=order)

    def attention(self, x: str, name: str) -> str:
        query = self.heads(x, f"{name}_q", [0, 2, 1, 3])
        key = self.heads(x, f"{name}_k", [0, 2, 3, 1])
        value = self.heads(x, f"{name}_v", [0, 2, 1, 3])
        scores = self.add("Mul", self.add("MatMul", query, key), self.scale)
        mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), value)
        mixed = self.add("Reshape", self.add("Transpose", mixed, perm=[0, 2, 1, 3]), self.joined)
        return self.linear(mixed, f"{name}_o", HIDDEN, HIDDEN)

    def gelu(self, x: str) -> str:
        erf = self.add("Erf", self.add("Mul", x, self.sqrt_half))
        return self.add("Mul", self.add("Mul", x, self.half), self.add("Add", erf, self.one))


def build_transformer(weights: Weights) -> onnx.GraphProto:
    """Build the model: ids [n, 32] to y [n, 384]."""
    graph = _Graph(weights)
    words = weights.normal("words", (VOCABULARY, HIDDEN), 0.02)
    places = weights.normal("places", (1, SEQUENCE, HIDDEN), 0.02)
    x = graph.normalized(graph.add("Add", graph.add("Gather", words, "ids"), places), "embedding")
    for layer in range(LAYERS):
        name = f"layer{layer}"
        x = graph.normalized(graph.add("Add", x, graph.attention(x, name)), f"{name}_1")
        inner = graph.gelu(graph.linear(x, f"{name}_up", HIDDEN, INNER))
        outer = graph.linear(inner, f"{name}_down", INNER, HIDDEN)
        x = graph.normalized(graph.add("Add", x, outer), f"{name}_2")
    graph.add("ReduceMean", x, output="y", axes=[1], keepdims=0)
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", SEQUENCE])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", HIDDEN])
    return helper.make_graph(graph.nodes, "transformer", [ids], [y], weights.tensors)
