"""Whether a model's time can depend on its inputs' values, and not only on their shapes."""

from __future__ import annotations

from pathlib import Path

from tensorferry.server.onnx_graph import value_dependent_nodes


def is_steady(path: Path) -> bool:
    """True when the graph lets the time of a run depend on shapes alone. False where that cannot be shown."""
    return path.suffix == ".onnx" and not value_dependent_nodes(path)
