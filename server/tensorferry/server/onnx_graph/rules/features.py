"""Operators of classical models (ai.onnx.ml) and of text, with one row of features for each row of a batch."""

from __future__ import annotations

from tensorferry.server.onnx_graph.operators import ML, MixesRows, Node, UnknownEffect, operator
from tensorferry.server.onnx_graph.row_axis import reject_rows_on, require_rows_only_in, shape_of, with_rows
from tensorferry.server.onnx_graph.sizes import Size
from tensorferry.server.onnx_graph.values import RowAxis, RowProblems, Value


def _matrix(node: Node) -> tuple[Size, RowAxis | None]:
    """The number of rows of a matrix of features, and where the rows of the batch are."""
    require_rows_only_in(node, 0)
    value = node.input(0)
    sizes = shape_of(value)
    if value.rows is not None and len(sizes) != 2:
        raise UnknownEffect("takes features that are no matrix")
    reject_rows_on(value, (1,), "takes features along")
    return sizes[0] if sizes else node.fresh(), value.rows


@operator("TreeEnsembleRegressor", "TreeEnsemble", "LinearRegressor", "SVMRegressor", domain=ML)
def regressor(node: Node) -> Value:
    """Scores for each row."""
    count, rows = _matrix(node)
    targets = (
        node.attribute("n_targets", 1) if node.operator != "LinearRegressor" else node.attribute("targets", 1)
    )
    return with_rows((count, int(targets)), rows)


@operator("TreeEnsembleClassifier", "LinearClassifier", "SVMClassifier", domain=ML)
def classifier(node: Node) -> list[Value]:
    """A label and scores for each row."""
    count, rows = _matrix(node)
    return [with_rows((count,), rows), with_rows((count, node.fresh()), rows)][: node.outputs]


@operator("Scaler", "Imputer", domain=ML)
def by_feature(node: Node) -> Value:
    """Each feature by itself, in every row."""
    value = node.input(0)
    _, rows = _matrix(node)
    return with_rows(shape_of(value), rows)


@operator("OneHotEncoder", domain=ML)
def one_hot_encoder(node: Node) -> Value:
    """One more axis, for the categories."""
    value = node.input(0)
    categories = node.attribute("cats_int64s") or node.attribute("cats_strings") or []
    return with_rows((*shape_of(value), len(categories)), value.rows)


@operator("TfIdfVectorizer", shape_from_values=True)
def tf_idf(node: Node) -> Value:
    """Counts of n-grams in each row of a matrix."""
    value = node.input(0)
    sizes = shape_of(value)
    if len(sizes) == 1:
        reject_rows_on(value, (0,), "counts n-grams along")
        return Value(node.fresh_shape(1))
    reject_rows_on(value, (1,), "counts n-grams along")
    return with_rows((sizes[0], node.fresh()), value.rows)


@operator("StringNormalizer", shape_from_values=True)
def string_normaliser(node: Node) -> Value:
    """Strings in upper or lower case; with stop words, those are left out."""
    value = node.input(0)
    sizes = shape_of(value)
    if node.attribute("stopwords"):
        if value.rows is not None:
            raise MixesRows("leaves out strings, so that it has as many as there are other words in all rows")
        return Value(node.fresh_shape(len(sizes)))
    if value.rows is not None and len(sizes) != 1:
        raise UnknownEffect("takes strings that are no vector")
    return with_rows(sizes, value.rows)


@operator("StringSplit", shape_from_values=True)
def string_split(node: Node) -> list[Value]:
    """Parts of each string, as many as the longest has."""
    value = node.input(0)
    if value.rows is not None:
        raise MixesRows("makes as many parts as the string that has most in all rows")
    sizes = shape_of(value)
    return [Value((*sizes, node.fresh())), Value(sizes)][: node.outputs]


@operator(
    "Multinomial", "Bernoulli", "RandomNormalLike", "RandomUniformLike", "RandomNormal", "RandomUniform"
)
def random(node: Node) -> Value:
    """Random numbers, which are others in each run."""
    return Value(problems=RowProblems(unknown=(f"{node.label} is random",)))
