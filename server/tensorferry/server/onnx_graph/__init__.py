"""The analysis of ONNX graphs: whether rows of a batch are kept apart, and whether time depends on values."""

from tensorferry.server.onnx_graph.analysis import (
    BatchAnalysis,
    RowMixing,
    analyse_batching,
    value_dependent_nodes,
)

__all__ = ["BatchAnalysis", "RowMixing", "analyse_batching", "value_dependent_nodes"]
