"""Classifiers like those that exporters produce."""

from __future__ import annotations

from pathlib import Path

from support.models.small import written


def trees(path: Path, label: int = 1) -> Path:
    """x FP32 [n, 2] → label INT64 with the declared shape [1], and probabilities FP32 [n, 3]: class 2 where x[0] > 0, else 1."""
    text = f"""(float[n, 2] x) => (int64[{label}] label, float[n, 3] probabilities) {{
        label, probabilities = ai.onnx.ml.TreeEnsembleClassifier <
            nodes_treeids = [0, 0, 0], nodes_nodeids = [0, 1, 2], nodes_featureids = [0, 0, 0],
            nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values = [0.0, 0.0, 0.0],
            nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0],
            nodes_missing_value_tracks_true = [0, 0, 0],
            class_treeids = [0, 0], class_nodeids = [1, 2], class_ids = [1, 2], class_weights = [1.0, 1.0],
            classlabels_int64s = [0, 1, 2], post_transform = "NONE"
        > (x)
    }}"""
    return written(path, text)
