"""Whether a model's time can depend on its inputs' values, and not only on their shapes."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

# Operators that repeat, branch, or make shapes from values.
_OPERATORS = (
    "Compress",
    "ConstantOfShape",
    "Expand",
    "If",
    "Loop",
    "MaxUnpool",
    "NonMaxSuppression",
    "NonZero",
    "OneHot",
    "Pad",
    "Range",
    "Resize",
    "Scan",
    "SequenceMap",
    "SplitToSequence",
    "Tile",
    "TopK",
    "Unique",
    "Upsample",
)

# As the field op_type, number 4 of a NodeProto, is serialised.
_PATTERN = re.compile(
    b"|".join(re.escape(bytes([4 << 3 | 2, len(name)]) + name.encode()) for name in _OPERATORS)
)


def is_steady(path: Path) -> bool:
    """True when nothing in the file lets the time of a run depend on values. False where it cannot be told."""
    if path.suffix != ".onnx" or not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _PATTERN.search(data) is None
