"""Operators of classical models (ai.onnx.ml) and of text, with one row of features per batch row."""

from __future__ import annotations

from tensorferry.server.onnx_graph.operators import ML, MixesRows, Node, UnknownEffect, operator
from tensorferry.server.onnx_graph.row_axis import reject_rows_on, require_rows_only_in, shape_of, with_rows
from tensorferry.server.onnx_graph.sizes import Size
from tensorferry.server.onnx_graph.values import RowAxis, Value


def _matrix(node: Node) -> tuple[Size, RowAxis | None]:
    """Return the number of rows of a feature matrix, and the row axis."""
    require_rows_only_in(node, 0)
    value = node.input(0)
    sizes = shape_of(value)
    if value.rows is not None and len(sizes) != 2:
        raise UnknownEffect("takes features that are not a matrix")
    reject_rows_on(value, (1,), "takes features along")
    return sizes[0] if sizes else node.fresh(), value.rows


@operator("TreeEnsembleRegressor", "TreeEnsemble", "LinearRegressor", "SVMRegressor", domain=ML)
def regressor(node: Node) -> Value:
    """Return scores for each row."""
    count, rows = _matrix(node)
    targets = (
        node.attribute("n_targets", 1) if node.operator != "LinearRegressor" else node.attribute("targets", 1)
    )
    return with_rows((count, int(targets)), rows)


@operator("TreeEnsembleClassifier", "LinearClassifier", "SVMClassifier", domain=ML)
def classifier(node: Node) -> list[Value]:
    """Return a label and scores for each row."""
    count, rows = _matrix(node)
    return [with_rows((count,), rows), with_rows((count, node.fresh()), rows)][: node.outputs]


@operator("Scaler", "Imputer", domain=ML)
def by_feature(node: Node) -> Value:
    """Map each feature of every row."""
    value = node.input(0)
    _, rows = _matrix(node)
    return with_rows(shape_of(value), rows)


@operator("OneHotEncoder", domain=ML)
def one_hot_encoder(node: Node) -> Value:
    """Add an axis for the categories."""
    value = node.input(0)
    categories = node.attribute("cats_int64s") or node.attribute("cats_strings") or []
    return with_rows((*shape_of(value), len(categories)), value.rows)


@operator("TfIdfVectorizer", shape_from_values=True)
def tf_idf(node: Node) -> Value:
    """Count n-grams in each row of a matrix."""
    value = node.input(0)
    sizes = shape_of(value)
    if len(sizes) == 1:
        reject_rows_on(value, (0,), "counts n-grams along")
        return Value(node.fresh_shape(1))
    reject_rows_on(value, (1,), "counts n-grams along")
    return with_rows((sizes[0], node.fresh()), value.rows)


@operator("StringNormalizer", shape_from_values=True)
def string_normaliser(node: Node) -> Value:
    """Change the case of strings, and remove stop words."""
    value = node.input(0)
    sizes = shape_of(value)
    if node.attribute("stopwords"):
        if value.rows is not None:
            raise MixesRows("removes strings, so that the output's length depends on all rows")
        return Value(node.fresh_shape(len(sizes)))
    if value.rows is not None and len(sizes) != 1:
        raise UnknownEffect("takes strings that are not a vector")
    return with_rows(sizes, value.rows)


@operator("StringSplit", shape_from_values=True)
def string_split(node: Node) -> list[Value]:
    """Split each string; the longest determines the number of parts."""
    value = node.input(0)
    if value.rows is not None:
        raise MixesRows("makes as many parts as the longest string of all rows has")
    sizes = shape_of(value)
    return [Value((*sizes, node.fresh())), Value(sizes)][: node.outputs]
