"""`tensorferry` whose free workers take all waiting requests at once. For `make gpu-bench`.

    python benchmarks/gpu/eager_server.py serve model.onnx

Two batches are in flight on a GPU, as usual; but the second closes as soon as its worker is free, not just in time
for the device, and no batch waits for returning callers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

from tensorferry.batcher.queue.devices import Device
from tensorferry.server.__main__ import main

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from closed_loop import Greedy


class Eager(Greedy):
    """Never waits for returning callers."""

    expected = property(lambda self: False)


if __name__ == "__main__":
    # Each refuses to start if the patched name is missing, since the server would then be unchanged.
    with (
        patch("tensorferry.batcher.queue.request_queue.ReturnModel", Eager),
        patch.object(Device, "dispatch_at", lambda device, now: now),
    ):
        sys.exit(main())
