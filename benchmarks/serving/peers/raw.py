"""Compute ceiling: ONNX Runtime in a loop in this process, without a server.

    python -m serving.peers.raw SECONDS ROWS [ROWS ...]

Prints one line of JSON for each batch size.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from serving.peers.settings import Engine

# Fewest runs, however long they take: a mean of two or three says little.
_LEAST_RUNS = 10


def measure(engine: Engine, width: int, rows: int, seconds: float) -> dict[str, float]:
    """Return rows per second in batches of `rows`, and the seconds of a batch, over at least
    `seconds`.
    """
    batch = np.ones((rows, width), engine.dtype)
    for _ in range(3):
        engine.run(batch)
    runs, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds or runs < _LEAST_RUNS:
        engine.run(batch)
        runs += 1
    return {"rows": rows, "rate": runs * rows / took, "batch_seconds": took / runs}


def main() -> None:
    """Print the lines."""
    engine = Engine()
    width = engine.input.shape[1]
    for rows in sys.argv[2:]:
        line = measure(engine, width if isinstance(width, int) else 16, int(rows), float(sys.argv[1]))
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
