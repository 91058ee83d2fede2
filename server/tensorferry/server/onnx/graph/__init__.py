"""Analysis of ONNX graphs: are the rows of a batch independent, and does the run time depend on values?"""

from tensorferry.server.onnx.graph.analysis import (
    BatchAnalysis,
    RowMixing,
    analyse_batching,
    value_dependent_nodes,
)
from tensorferry.server.onnx.graph.model_file import external_files, operator_types

__all__ = [
    "BatchAnalysis",
    "RowMixing",
    "analyse_batching",
    "external_files",
    "operator_types",
    "value_dependent_nodes",
]
