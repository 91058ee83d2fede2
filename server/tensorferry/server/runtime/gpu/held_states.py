"""States of sequences in device memory: a batch takes them from the blocks of the last answers, and leaves new blocks.

A run never writes to what it reads, because ONNX Runtime may then read what it has written (its issue 32243).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.batcher import HeldTensor, Tensor
from tensorferry.server.runtime.gpu.buffer_pool import BufferPool
from tensorferry.server.runtime.gpu.pinned_memory import DeviceMemory, MemoryBlock
from tensorferry.server.runtime.gpu.tensor_layout import TensorPlacement, aligned

Array = npt.NDArray[Any]


class DeviceState(HeldTensor):
    """One row of a state in device memory."""

    __slots__ = ("_memory", "_owner", "address")

    def __init__(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        memory: DeviceMemory,
        owner: MemoryBlock,
        address: int,
    ) -> None:
        super().__init__(dtype, shape)
        self._memory = memory
        self._owner = owner
        self.address = address

    def numpy(self) -> Array:
        """Return a copy in the host's memory."""
        array: Array = np.empty(self.shape, self.dtype)
        self._memory.fetch(array.ctypes.data, self.address, self.nbytes)
        return array


class HeldStates:
    """Copies rows of states to batches in device memory, and keeps those that batches leave. Thread-safe.

    States take at most `max_bytes` of device memory.
    """

    def __init__(self, memory: DeviceMemory, max_bytes: int) -> None:
        self._memory = memory
        self._pool = BufferPool(memory.device, max_bytes)

    def load(self, address: int, states: Sequence[tuple[TensorPlacement, Sequence[Tensor]]]) -> None:
        """Copy the rows of inputs to a batch at an address. Padding rows are copies of the last one."""
        copies = []
        # Until the copies are made.
        used: list[Array] = []
        for place, rows in states:
            nbytes = place.nbytes // place.shape[0]
            sources = []
            for tensor in rows if nbytes else ():
                if isinstance(tensor.data, DeviceState):
                    sources.append(tensor.data.address)
                else:
                    used.append(host_array(tensor))
                    sources.append(used[-1].ctypes.data)
            sources += sources[-1:] * (place.shape[0] - len(sources))
            start = address + place.offset
            copies += [(start + row * nbytes, source, nbytes) for row, source in enumerate(sources)]
        self._memory.copy_all(copies)

    def keep(
        self, address: int, places: Sequence[TensorPlacement], rows: int
    ) -> dict[str, list[DeviceState]] | None:
        """Copy the rows of outputs of a batch to blocks of their own; return them by name, None if there is no memory."""
        sizes = [place.nbytes // place.shape[0] for place in places]
        kept: dict[str, list[DeviceState]] = {place.spec.name: [] for place in places}
        copies = []
        for row in range(rows):
            block = self._pool.acquire(sum(map(aligned, sizes)))
            if block is None:
                return None
            # The last of the states in the block returns it to the pool.
            owner = MemoryBlock(block.address, block.nbytes, partial(self._pool.release, block))
            target = block.address
            for place, nbytes in zip(places, sizes, strict=True):
                copies.append((target, address + place.offset + row * nbytes, nbytes))
                shape = (1, *place.shape[1:])
                state = DeviceState(place.spec.datatype.storage, shape, self._memory, owner, target)
                kept[place.spec.name].append(state)
                target += aligned(nbytes)
        self._memory.copy_all(copies)
        return kept


def host_array(tensor: Tensor) -> Array:
    """Return the array of a tensor, which may be a state."""
    if isinstance(tensor.data, HeldTensor):
        return tensor.data.numpy()
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
