"""ResNet-50 and BERT-base as ONNX graphs with seeded random weights, and small ones of the same form.

The values do not matter, but the work must be of the right kind and size. The weights are scaled so
that the activations stay within FP16 through all layers, and every output depends on every input.
The outputs have the weights' type: the server's batching check allows FP16 the rounding of FP16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from serving.weights import Weights

IMAGE, LOGITS = "image", "logits"
IDS, MASK, SEGMENTS, START, END = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "start_logits",
    "end_logits",
)
CLASSES = 1000
# Of the three channels of ImageNet's images, on the scale of 0 to 255.
_MEANS, _DEVIATIONS = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_EXPANSION = 4
# Each block's sum is damped, because it would outgrow FP16 after some blocks.
_DAMPED = 0.25
# Added to the scores of masked positions: within FP16, and low enough to have no effect.
_MASKED = -10000.0


@dataclass(frozen=True, slots=True)
class Resnet:
    """Bottleneck blocks in four stages, with `width` channels in the first; images of size × size × 3."""

    blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    width: int = 64
    size: int = 224
    half: bool = True


@dataclass(frozen=True, slots=True)
class Bert:
    """Encoder with a question-answering head, as MLPerf's: start and end of an answer in the text."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    sequence: int = 384
    vocabulary: int = 30522
    half: bool = True


class _Graph:
    """Nodes of the graph, in order; each method adds some and returns the name of the result."""

    def __init__(self, half: bool) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.dtype = np.float16 if half else np.float32
        self.kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
        self.weights = Weights(dtype=self.dtype)
        self._constants = 0

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def number(self, value: object) -> str:
        """Add a constant of the weights' type."""
        return self._constant(np.asarray(value, self.dtype))

    def shape(self, *dims: int) -> str:
        """Add a constant shape; 0 keeps the input's dimension, -1 is the remaining size."""
        return self._constant(np.array(dims, np.int64))

    def _constant(self, value: object) -> str:
        self._constants += 1
        return self.weights.constant(f"constant{self._constants}", value)

    def linear(self, x: str, name: str, inputs: int, outputs: int) -> str:
        weight = self.weights.normal(f"{name}_w", (inputs, outputs))
        return self.add(
            "Add", self.add("MatMul", x, weight), self.weights.normal(f"{name}_b", (outputs,), 0.01)
        )

    def convolved(
        self, x: str, name: str, channels: tuple[int, int], kernel: int, stride: int = 1, gain: float = 1.0
    ) -> str:
        inputs, outputs = channels
        deviation = gain * math.sqrt(2 / (inputs * kernel * kernel))
        weight = self.weights.normal(f"{name}_w", (outputs, inputs, kernel, kernel), deviation)
        bias = self.weights.normal(f"{name}_b", (outputs,), 0.01)
        sizes: dict[str, Any] = {
            "kernel_shape": [kernel] * 2,
            "strides": [stride] * 2,
            "pads": [kernel // 2] * 4,
        }
        return self.add("Conv", x, weight, bias, **sizes)

    def normalized(self, x: str, name: str, width: int) -> str:
        gain = self.weights.constant(f"{name}_gain", np.ones(width, self.dtype))
        bias = self.weights.constant(f"{name}_bias", np.zeros(width, self.dtype))
        return self.add("LayerNormalization", x, gain, bias, axis=-1)

    def model(
        self, name: str, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, inputs, outputs, self.weights.tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 9  # The newest version that ONNX Runtime 1.20 reads.
        return model


def build_resnet(shape: Resnet) -> onnx.ModelProto:
    """Build the model: image UINT8 [n, size, size, 3] to logits [n, 1000], with normalisation in the
    graph.
    """
    graph = _Graph(shape.half)
    scale = [1 / deviation for deviation in _DEVIATIONS]
    offset = [-mean / deviation for mean, deviation in zip(_MEANS, _DEVIATIONS, strict=True)]
    x = graph.add("Cast", IMAGE, to=graph.kind)
    x = graph.add("Add", graph.add("Mul", x, graph.number(scale)), graph.number(offset))
    x = graph.add("Transpose", x, perm=[0, 3, 1, 2])
    x = graph.add("Relu", graph.convolved(x, "stem", (3, shape.width), 7, 2))
    x = graph.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = shape.width
    for stage, blocks in enumerate(shape.blocks):
        inner = shape.width << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            x = _bottleneck(graph, x, f"stage{stage}_{block}", channels, inner, stride)
            channels = inner * _EXPANSION
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x), axis=1)
    head = graph.weights.normal("head_w", (channels, CLASSES))
    graph.add("Gemm", x, head, graph.weights.normal("head_b", (CLASSES,), 0.01), output=LOGITS)
    image = helper.make_tensor_value_info(IMAGE, TensorProto.UINT8, ["n", shape.size, shape.size, 3])
    return graph.model("resnet", [image], [helper.make_tensor_value_info(LOGITS, graph.kind, ["n", CLASSES])])


def _bottleneck(graph: _Graph, x: str, name: str, channels: int, inner: int, stride: int) -> str:
    """Add a block, with the stride in the 3 × 3 convolution, as in ResNet version 1.5."""
    outputs = inner * _EXPANSION
    y = graph.add("Relu", graph.convolved(x, f"{name}_1", (channels, inner), 1))
    y = graph.add("Relu", graph.convolved(y, f"{name}_2", (inner, inner), 3, stride))
    y = graph.convolved(y, f"{name}_3", (inner, outputs), 1, gain=_DAMPED)
    if stride != 1 or channels != outputs:
        # No gain for ReLU, because only the sum follows.
        x = graph.convolved(x, f"{name}_x", (channels, outputs), 1, stride, math.sqrt(0.5))
    return graph.add("Relu", graph.add("Add", y, x))


def build_bert(shape: Bert) -> onnx.ModelProto:
    """Build the model: input_ids, attention_mask, token_type_ids INT64 [n, sequence] to start_logits,
    end_logits [n, sequence].
    """
    graph, hidden, sequence = _Graph(shape.half), shape.hidden, shape.sequence
    words = graph.weights.normal("words", (shape.vocabulary, hidden), 0.02)
    places = graph.weights.normal("places", (1, sequence, hidden), 0.02)
    segments = graph.weights.normal("segments", (2, hidden), 0.02)
    x = graph.add("Add", graph.add("Gather", words, IDS), graph.add("Gather", segments, SEGMENTS))
    x = graph.normalized(graph.add("Add", x, places), "embedding", hidden)
    seen = graph.add("Cast", graph.add("Unsqueeze", MASK, graph.shape(1, 2)), to=graph.kind)
    unseen = graph.add("Mul", graph.add("Sub", graph.number(1.0), seen), graph.number(_MASKED))
    for layer in range(shape.layers):
        name = f"layer{layer}"
        x = graph.normalized(
            graph.add("Add", x, _attention(graph, x, unseen, name, shape)), f"{name}_1", hidden
        )
        inner = _gelu(graph, graph.linear(x, f"{name}_up", hidden, 4 * hidden))
        outer = graph.linear(inner, f"{name}_down", 4 * hidden, hidden)
        x = graph.normalized(graph.add("Add", x, outer), f"{name}_2", hidden)
    both = graph.linear(x, "head", hidden, 2)
    for at, name in enumerate((START, END)):
        graph.add("Gather", both, graph.weights.constant(f"column{at}", np.int64(at)), output=name, axis=2)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["n", sequence])
        for name in (IDS, MASK, SEGMENTS)
    ]
    outputs = [helper.make_tensor_value_info(name, graph.kind, ["n", sequence]) for name in (START, END)]
    return graph.model("bert", inputs, outputs)


def _attention(graph: _Graph, x: str, unseen: str, name: str, shape: Bert) -> str:
    hidden, heads = shape.hidden, shape.heads
    each = hidden // heads
    split = graph.shape(0, 0, heads, each)
    query, key, value = (
        graph.add(
            "Transpose",
            graph.add("Reshape", graph.linear(x, f"{name}_{part}", hidden, hidden), split),
            perm=order,
        )
        for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
    )
    scores = graph.add("Mul", graph.add("MatMul", query, key), graph.number(1 / math.sqrt(each)))
    weighed = graph.add("Softmax", graph.add("Add", scores, unseen), axis=-1)
    mixed = graph.add("Transpose", graph.add("MatMul", weighed, value), perm=[0, 2, 1, 3])
    return graph.linear(graph.add("Reshape", mixed, graph.shape(0, 0, hidden)), f"{name}_o", hidden, hidden)


def _gelu(graph: _Graph, x: str) -> str:
    erf = graph.add("Erf", graph.add("Mul", x, graph.number(math.sqrt(0.5))))
    return graph.add("Mul", graph.add("Mul", x, graph.number(0.5)), graph.add("Add", erf, graph.number(1.0)))
