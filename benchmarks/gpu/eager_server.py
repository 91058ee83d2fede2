"""`tensorferry` with a greedy close: each free worker takes what waits, at once. For `make gpu-bench`.

    python benchmarks/gpu/eager_server.py serve model.onnx

Two batches are in flight on a GPU, as usual; but the second closes as soon as its worker is free,
not just in time for the device. Nor does a batch wait for callers that come back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tensorferry.batcher.device import Device
from tensorferry.server.__main__ import main

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from closed_loop import Greedy


class Eager(Greedy):
    """Waits for nobody, whether or not they come back."""

    expected = property(lambda self: False)


def at_once(device: Device, now: float) -> float:
    """Whenever a worker asks: `Device.turn`, for a device that is given all there is."""
    del device
    return now


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, every queue closes eagerly. A name that is not there any more is an error, not a server as it is shipped."""
    with patch("tensorferry.batcher.queue.Returners", Eager), patch.object(Device, "turn", at_once):
        yield


if __name__ == "__main__":
    with eagerly():
        sys.exit(main())
