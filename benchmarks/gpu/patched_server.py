"""`tensorferry` without something that it has no flag for. For `make gpu-bench`.

    python benchmarks/gpu/patched_server.py eager serve model.onnx

eager: each free worker takes what waits, at once. Two batches are in flight on a GPU, as usual; but
the second closes as soon as its worker is free, not just in time for the device. Nor does a batch
wait for callers that come back.

unstaged: batches go to a GPU without buffers of the server's own, pinned or there: ONNX Runtime
makes them for each run.
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
    """Waits for nobody, whether or not they come back."""

    expected = property(lambda self: False)


def at_once(device: Device, now: float) -> float:
    """`Device.turn` for a device that is given all there is, whenever a worker asks."""
    del device
    return now


@contextmanager
def eager() -> Iterator[None]:
    """Inside, every queue closes eagerly."""
    with (
        patch("tensorferry.batcher.queue.request_queue.Returners", Eager),
        patch.object(Device, "turn", at_once),
    ):
        yield


@contextmanager
def unstaged() -> Iterator[None]:
    """Inside, no session has buffers of its own."""
    with patch("tensorferry.server.runtime.session._cuda_memory", lambda device: None):
        yield


# Each refuses to start where what it patches is not there: it would be the server as it is shipped.
PATCHES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {"eager": eager, "unstaged": unstaged}


if __name__ == "__main__":
    with PATCHES[sys.argv.pop(1)]():
        sys.exit(main())
