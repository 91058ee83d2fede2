"""`tensorferry` without a part that has no flag. For `make gpu-bench`.

    python benchmarks/gpu/patched_server.py eager serve model.onnx

eager: each free worker takes all waiting requests at once. Two batches are in flight on a GPU, as
usual; but the second closes as soon as its worker is free, not just in time for the device, and no
batch waits for returning callers.

unstaged: batches go to a GPU without the server's own pinned buffers: ONNX Runtime allocates them
for each run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

from tensorferry.batcher.queue.devices import Device
from tensorferry.server.__main__ import main

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from closed_loop import Greedy


class Eager(Greedy):
    """Never waits for returning callers."""

    expected = property(lambda self: False)


def at_once(device: Device, now: float) -> float:
    """`Device.dispatch_at`, for a device that takes all there is whenever a worker asks."""
    del device
    return now


@contextmanager
def eager() -> Iterator[None]:
    """Make every queue close eagerly."""
    with (
        patch("tensorferry.batcher.queue.request_queue.ReturnModel", Eager),
        patch.object(Device, "dispatch_at", at_once),
    ):
        yield


@contextmanager
def unstaged() -> Iterator[None]:
    """Make every session run without its own buffers."""
    with patch("tensorferry.server.runtime.session._cuda_memory", lambda device: None):
        yield


# Each refuses to start if the patched name is missing, since the server would then be unchanged.
PATCHES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {"eager": eager, "unstaged": unstaged}


if __name__ == "__main__":
    with PATCHES[sys.argv.pop(1)]():
        sys.exit(main())
