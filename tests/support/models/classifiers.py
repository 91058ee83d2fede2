"""Classifiers like those that exporters produce."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper
from support.models.small import value


def trees(path: Path, label: int = 1) -> Path:
    """x FP32 [n, 2] → label INT64 with the declared shape [1], and probabilities FP32 [n, 3]: class 2 where x[0] > 0, else 1."""
    classifier = helper.make_node(
        "TreeEnsembleClassifier",
        ["x"],
        ["label", "probabilities"],
        domain="ai.onnx.ml",
        nodes_treeids=[0, 0, 0],
        nodes_nodeids=[0, 1, 2],
        nodes_featureids=[0, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_values=[0.0, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0],
        nodes_falsenodeids=[2, 0, 0],
        nodes_missing_value_tracks_true=[0, 0, 0],
        class_treeids=[0, 0],
        class_nodeids=[1, 2],
        class_ids=[1, 2],
        class_weights=[1.0, 1.0],
        classlabels_int64s=[0, 1, 2],
        post_transform="NONE",
    )
    graph = helper.make_graph(
        [classifier],
        "trees",
        [value("x", dims=["n", 2])],
        [value("label", "INT64", [label]), value("probabilities", dims=["n", 3])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return path
