"""Ends of encoders' graphs: from the vectors of tokens, or from logits, to what a task on texts answers with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from tensorferry.server.onnx.graph.rewriting.changes import callers_inputs
from tensorferry.serving.text_tasks import (
    CLASSIFY,
    EMBEDDING,
    FIRST,
    LAST,
    LOGIT,
    LOGITS,
    POOLINGS,
    RERANK,
    SCORE,
    SCORES,
    TOKENS,
    VECTOR,
    TextHead,
)

# Above zero also in FP16.
_LEAST_LENGTH = 1e-6
# The first versions of the operator set with CumSum, and with axes as inputs of ReduceSum, Squeeze and Unsqueeze, and of
# ReduceL2.
_CUM_SUM, _SUM_AXES, _L2_AXES = 11, 13, 18
_FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.BFLOAT16,
)


class NoHead(ValueError):
    """The file has no output that the task can read. The text says what it has and what to do."""


def add_head(model: onnx.ModelProto, head: TextHead) -> None:
    """Add a head to a model in place. Its outputs, which `HEAD_OUTPUTS` names, replace those of the model. NoHead."""
    output = _output(model, head, 3 if head.task == EMBEDDING and head.pooling is not None else 2)
    graph = _Graph(model, head.mask)
    made = graph.as_float(output)
    size = output.type.tensor_type.shape.dim[-1]
    if head.task == EMBEDDING:
        made = graph.pooled(made, head.pooling)
        if head.normalize:
            length = graph.along("ReduceL2", _L2_AXES, made, keepdims=1)
            made = graph.node(
                "Div", made, graph.node("Max", length, graph.constant(_LEAST_LENGTH, np.float32))
            )
        outputs = [graph.output(VECTOR, made, onnx.TensorProto.FLOAT, size)]
    elif head.task == RERANK:
        if size.HasField("dim_value") and size.dim_value != 1:
            raise NoHead(
                f"output {output.name!r} has {size.dim_value} logits for each text, but a reranker has one; declare a classifier"
            )
        logit = graph.node("Gather", made, graph.constant(0), axis=1)
        outputs = [
            graph.output(SCORE, graph.node("Sigmoid", logit), onnx.TensorProto.FLOAT),
            graph.output(LOGIT, logit, onnx.TensorProto.FLOAT),
        ]
    else:
        assert head.task == CLASSIFY
        scores = graph.node("Sigmoid", made) if head.multi_label else graph.node("Softmax", made, axis=1)
        outputs = [
            graph.output(SCORES, scores, onnx.TensorProto.FLOAT, size),
            graph.output(LOGITS, made, onnx.TensorProto.FLOAT, size),
        ]
    tokens = graph.along("ReduceSum", _SUM_AXES, graph.mask, keepdims=0)
    outputs.append(graph.output(TOKENS, tokens, onnx.TensorProto.INT64))
    del model.graph.output[:]
    model.graph.output.extend(outputs)


def has_pooled_output(model: onnx.ModelProto) -> bool:
    """Return whether all outputs of floats have one vector a text."""
    ranks = [_rank(value) for value in _float_outputs(model)]
    return bool(ranks) and all(rank == 2 for rank in ranks)


def unknown_pooling(model: onnx.ModelProto) -> NoHead:
    """Return the error of an encoder that gives a vector for each token, whose pooling nothing says.

    One with another output, such as BERT's `pooler_output`, is no exception: it is seldom the vector of a text.
    """
    return NoHead(
        "it gives a vector for each token, which must be pooled; declare the pooling that the encoder was trained with, "
        f"{', '.join(map(repr, POOLINGS))}, or None for its output with one vector a text: it has {_outputs(model)}"
    )


def _output(model: onnx.ModelProto, head: TextHead, rank: int) -> onnx.ValueInfoProto:
    """Return the output that a head reads."""
    given = [value for value in _float_outputs(model) if head.output in ("", value.name)]
    fitting = [value for value in given if _rank(value) == rank]
    if len(fitting) == 1:
        return fitting[0]
    has = _outputs(model)
    if not given:
        raise NoHead(f"it has no output {head.output!r} of floats; it has {has}")
    if len(fitting) > 1:
        raise NoHead(f"several outputs have {rank} axes; name one by `output`: it has {has}")
    if head.task == EMBEDDING and rank == 2:
        raise unknown_pooling(model)
    wanted = (
        "a vector for each token; declare pooling=None if it is pooled"
        if rank == 3
        else "logits for each text"
    )
    raise NoHead(f"no output has {rank} axes, {wanted}: it has {has}")


def _outputs(model: onnx.ModelProto) -> str:
    return ", ".join(map(_described, model.graph.output))


def _float_outputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    return [value for value in model.graph.output if value.type.tensor_type.elem_type in _FLOATS]


def _rank(value: onnx.ValueInfoProto) -> int:
    return len(value.type.tensor_type.shape.dim)


def _described(value: onnx.ValueInfoProto) -> str:
    dims = value.type.tensor_type.shape.dim
    return f"{value.name} [{', '.join(str(dim.dim_value) if dim.HasField('dim_value') else dim.dim_param or '?' for dim in dims)}]"


class _Graph:
    """Adds nodes to a graph. Methods return the name of what a node gives."""

    def __init__(self, model: onnx.ModelProto, mask: str) -> None:
        self._graph = model.graph
        self._opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
        self._count = 0
        inputs = {value.name: value for value in callers_inputs(model)}
        first = next(iter(inputs.values()))
        self._rows = first.type.tensor_type.shape.dim[0]
        self.mask = mask
        if mask not in inputs:
            # The encoder needs none, but pooling and the number of tokens do.
            added = self._graph.input.add()
            added.CopyFrom(first)
            added.name = mask
            added.type.tensor_type.elem_type = onnx.TensorProto.INT64
            del added.type.tensor_type.shape.dim[2:]
        elif inputs[mask].type.tensor_type.elem_type != onnx.TensorProto.INT64:
            raise NoHead(f"its input {mask!r} is no INT64, which the mask of a tokenizer is")

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        self._count += 1
        output = f"tensorferry.{operator}_{self._count}"
        self._graph.node.append(helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        return output

    def constant(self, value: npt.ArrayLike, kind: npt.DTypeLike = np.int64) -> str:
        self._count += 1
        name = f"tensorferry.constant_{self._count}"
        self._graph.initializer.append(numpy_helper.from_array(np.array(value, kind), name))
        return name

    def along(self, operator: str, since: int, value: str, **attributes: Any) -> str:
        """Add a node with axis 1, which is an input `since` a version of the operator set."""
        if self._opset >= since:
            return self.node(operator, value, self.constant([1]), **attributes)
        return self.node(operator, value, axes=[1], **attributes)

    def as_float(self, value: onnx.ValueInfoProto) -> str:
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            return value.name
        return self.node("Cast", value.name, to=onnx.TensorProto.FLOAT)

    def pooled(self, vectors: str, pooling: str | None) -> str:
        """Add the pooling of the vectors of tokens. Tokens are at the start of a row, padding at its end."""
        if pooling is None:
            return vectors
        if pooling == FIRST:
            return self.node("Gather", vectors, self.constant(0), axis=1)
        weights = self.node("Cast", self.mask, to=onnx.TensorProto.FLOAT)
        if pooling == LAST:
            if self._opset < _CUM_SUM:
                raise NoHead(
                    f"its operator set has version {self._opset}, and the pooling 'last' needs {_CUM_SUM}; export it again"
                )
            position = self.node("CumSum", weights, self.constant(1))
            total = self.along("ReduceSum", _SUM_AXES, weights, keepdims=1)
            is_last = self.node("Cast", self.node("Equal", position, total), to=onnx.TensorProto.FLOAT)
            # The padding after the last token has its position.
            weights = self.node("Mul", is_last, weights)
        summed = self.node("MatMul", self.along("Unsqueeze", _SUM_AXES, weights), vectors)
        summed = self.along("Squeeze", _SUM_AXES, summed)
        if pooling == LAST:
            return summed
        count = self.along("ReduceSum", _SUM_AXES, weights, keepdims=1)
        return self.node("Div", summed, self.node("Max", count, self.constant(1, np.float32)))

    def output(self, name: str, value: str, kind: int, size: Any = None) -> onnx.ValueInfoProto:
        """Return an output with one row a text."""
        self._graph.node.append(helper.make_node("Identity", [value], [name], name=name))
        described = helper.make_tensor_value_info(name, kind, [None] if size is None else [None, None])
        dims = described.type.tensor_type.shape.dim
        dims[0].CopyFrom(self._rows)
        if size is not None:
            dims[1].CopyFrom(size)
        return described
