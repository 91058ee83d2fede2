"""Operators of classical models and of text that have a row of features, or strings, per row of the batch."""

from __future__ import annotations

from tensorferry.server.onnx.graph.operators import ML, Node, operator
from tensorferry.server.onnx.graph.row_axis import reject_rows_on, with_rows
from tensorferry.server.onnx.graph.values import MixesRows, UnknownEffect, Value


@operator("OneHotEncoder", ML)
def one_hot_encoder(node: Node) -> Value:
    """Add an axis for the categories."""
    categories = node.attribute("cats_int64s") or node.attribute("cats_strings") or []
    return with_rows((*node.shape(0), len(categories)), node.input(0).rows)


@operator("TfIdfVectorizer", shape_from_values=True)
def tf_idf(node: Node) -> Value:
    """Count n-grams in each row of a matrix, or in a vector."""
    value, sizes = node.input(0), node.shape(0)
    is_matrix = len(sizes) > 1
    reject_rows_on(value, (int(is_matrix),), "counts n-grams along")
    return with_rows((sizes[0], node.fresh()) if is_matrix else node.fresh_shape(1), value.rows)


@operator("StringNormalizer", shape_from_values=True)
def string_normaliser(node: Node) -> Value:
    """Change the case of strings, and remove stop words."""
    value, sizes = node.input(0), node.shape(0)
    if node.attribute("stopwords"):
        if value.rows is not None:
            raise MixesRows("removes strings, so that the output's length depends on all rows")
        return Value(node.fresh_shape(len(sizes)))
    if value.rows is not None and len(sizes) != 1:
        raise UnknownEffect("takes strings that are not a vector")
    return with_rows(sizes, value.rows)
