"""Staging buffers: batches are joined in page-locked host memory, copied to the device, run there and copied back.

A batch goes through four steps. `place` returns arrays in a block of host memory, and the caller fills them with the
inputs. `load` copies the inputs to a slot, which is a block of device memory. `compute` runs the model on the slot,
whose addresses are bound once. `fetch` copies the outputs to the host block, returns arrays of that block, and
releases the slot. Only `compute` uses the device's kernels, so the batcher can load or fetch another batch meanwhile.

A weak reference releases the host block when no array of it is left: no input, output or view. So a response may be
sent late. A batch that is dropped before `fetch` releases its slot. `place` returns None if too much memory is in use;
the caller then uses its own memory.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.server.runtime.gpu.buffer_pool import BufferPool, pop, size_class
from tensorferry.server.runtime.gpu.cuda_graphs import CapturedShapes
from tensorferry.server.runtime.gpu.held_states import HeldStates, host_array
from tensorferry.server.runtime.gpu.pinned_memory import DeviceMemory, MemoryBlock
from tensorferry.server.runtime.gpu.tensor_layout import (
    Shape,
    TensorLayout,
    TensorPlacement,
    ranges_of,
    tensor_layout_for,
)
from tensorferry.server.runtime.ort import ort_message
from tensorferry.server.signature import Signature, TensorSpec

_log = logging.getLogger("tensorferry.server")

Array = npt.NDArray[Any]

# Limit for one session, on the host and on the device each.
_MAX_BYTES = 1 << 30
_NO_STATES: Mapping[str, str] = {}
# Bytes of a row's state from which it stays on the device. Each copy there is a call of some microseconds, in which the
# host moves about as many bytes (not measured on a GPU).
_LEAST_KEPT = 1 << 16
# Limit for cached layouts, and for cached bindings of a slot.
_MAX_CACHED_SHAPES = 256


class CaptureError(Exception):
    """The model cannot be captured as a CUDA graph. The message says why."""


class DeviceSlot:
    """Block of device memory and its bindings, by the inputs' shapes and by whether the outputs' are known.

    `graph` is the number of a captured graph. Such a slot is for one shape only.
    """

    __slots__ = ("bindings", "block", "graph")

    def __init__(self, block: MemoryBlock, graph: int | None = None) -> None:
        self.block = block
        self.graph = graph
        self.bindings: dict[tuple[tuple[Shape, ...], bool], Any] = {}

    @property
    def nbytes(self) -> int:
        """Size of the block in bytes."""
        return self.block.nbytes


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Layout of batches with some input shapes. `key` holds the layout's shapes; `rows` is the batch's own if it is padded."""

    layout: TensorLayout
    key: tuple[Shape, ...]
    rows: int | None


_NO_LAYOUT = BatchLayout(TensorLayout((), (), (), 0), (), None)


class StagedBatch(dict[str, Any]):
    """Inputs of a batch, for the caller to fill: arrays, and lists of Tensors for states that are kept on the device.

    See `BatchLayout` for `layout`, `key` and `rows`. `states` are the outputs that are kept, by their inputs.
    """

    __slots__ = ("_release", "address", "key", "layout", "root", "rows", "slot", "states")

    def __init__(
        self,
        batch_layout: BatchLayout,
        root: Any,
        address: int,
        release: Callable[[StagedBatch], None],
        states: Mapping[str, str],
    ) -> None:
        self.layout = batch_layout.layout
        self.key = batch_layout.key
        self.rows = batch_layout.rows
        # The arrays keep `root` alive, and `root` keeps the block.
        self.root = root
        self.address = address
        self.slot: DeviceSlot | None = None
        self._release = release
        self.states = states
        places = {place.spec.name: place for place in batch_layout.layout.inputs}
        super().__init__(
            [(name, [] if name in states else self.array(place)) for name, place in places.items()]
        )

    def __del__(self) -> None:
        # A loaded batch does not run if its device fails or hangs before.
        if self.slot is not None:
            self._release(self)

    def array(self, place: TensorPlacement) -> Array:
        """Return a tensor without its padding rows."""
        full: Array = np.ndarray(place.shape, place.spec.datatype.storage, self.root, place.offset)
        return full if self.rows is None else full[: self.rows]


class StagingBuffers:
    """Memory of one session's batches, and their steps. Thread-safe, but one thread at a time per batch.

    `path` is the model's file, for messages. `run` runs a binding, either directly (None) or as the captured graph with that number.
    """

    def __init__(
        self,
        path: Path,
        signature: Signature,
        memory: DeviceMemory,
        binding: Callable[[], Any],
        run: Callable[[Any, int | None], None],
    ) -> None:
        self._path = path
        self._signature = signature
        self._memory = memory
        self._binding = binding
        self._run = run
        self._held = HeldStates(memory, _MAX_BYTES)
        self._host = BufferPool(memory.host, _MAX_BYTES)
        self._device = BufferPool(lambda nbytes: DeviceSlot(memory.device(nbytes)), _MAX_BYTES)
        self._layouts: dict[tuple[Any, ...], BatchLayout | None] = {}
        self._outputs_known = True
        self._captured_shapes: CapturedShapes | None = None
        # Free slots of each captured shape. There are two: one computes while the other is loaded or fetched.
        self._captured_slots: dict[tuple[Shape, ...], deque[DeviceSlot]] = {}

    def place(
        self, shapes: Mapping[str, Shape], states: Mapping[str, str] = _NO_STATES, *, outputs: bool = True
    ) -> StagedBatch | None:
        """Return memory for a batch with these input shapes; None if there is none.

        `states` are outputs whose rows may stay on the device, by their inputs. Without `outputs`, the outputs' shapes count
        as unknown.
        """
        key = (*shapes.items(), outputs)
        batch_layout = self._layouts.get(key, _NO_LAYOUT)
        if batch_layout is _NO_LAYOUT:
            if len(self._layouts) >= _MAX_CACHED_SHAPES:
                self._layouts.clear()
            batch_layout = self._layouts[key] = self._layout_for(shapes, outputs and self._outputs_known)
        if batch_layout is None:
            return None
        block = self._host.acquire(batch_layout.layout.nbytes)
        if block is None:
            return None
        if states:
            states = {
                place.spec.name: states[place.spec.name]
                for place in batch_layout.layout.inputs
                if place.spec.name in states and place.nbytes >= _LEAST_KEPT * place.shape[0]
            }
        # With the block's size instead of the layout's, because ctypes never frees an array type.
        root = (ctypes.c_ubyte * block.nbytes).from_address(block.address)
        weakref.finalize(root, self._host.release, block).atexit = False
        return StagedBatch(batch_layout, root, block.address, self._release, states)

    def _layout_for(self, given: Mapping[str, Shape], outputs: bool) -> BatchLayout | None:
        """Return the layout of batches with these shapes; None if the shapes do not fit the model."""
        if given.keys() != {spec.name for spec in self._signature.inputs}:
            return None
        shapes = {spec.name: given[spec.name] for spec in self._signature.inputs}
        if any(len(shapes[spec.name]) != len(spec.dims) for spec in self._signature.inputs):
            return None
        captured = self._captured_shapes.captured_shape(shapes) if self._captured_shapes is not None else None
        rows = None
        if captured is not None and captured != shapes:
            rows = next(iter(shapes.values()))[0]
            shapes = dict(captured)
        return BatchLayout(
            tensor_layout_for(self._signature, shapes, outputs=outputs), tuple(shapes.values()), rows
        )

    def load(self, batch: StagedBatch) -> bool:
        """Copy the inputs to a slot. Return False if no slot is available."""
        slot = None if batch.layout.unknown else pop(self._captured_slots.get(batch.key))
        slot = slot or self._device.acquire(batch.layout.nbytes)
        if slot is None:
            return False
        batch.slot = slot
        places, states, at = batch.layout.inputs, batch.states, slot.block.address
        try:
            _pad(batch)
            for start, end in ranges_of(place for place in places if place.spec.name not in states):
                self._memory.load(at + start, batch.address + start, end - start)
            if states:
                held = [(place, batch[place.spec.name]) for place in places if place.spec.name in states]
                self._held.load(at, held)
        except BaseException:
            self._release(batch)
            raise
        return True

    def compute_or_repeat(self, batch: StagedBatch) -> StagedBatch:
        """Run the model on a loaded batch. Return the batch to fetch, which is another one if the run had to be repeated."""
        try:
            self.compute(batch)
            return batch
        except Exception as error:
            if not batch.layout.outputs or not re.search("shape|dimension", str(error)):
                raise
            # The file may declare a wrong shape for an output.
            again = self.place_copies(host_arrays(batch), outputs=False)
            if again is None or not self.load(again):
                raise
            self.compute(again)
            self._outputs_known = False
            self._layouts.clear()
            _log.warning(
                "%s declares wrong shapes for its outputs, so their memory is not allocated in advance: %s",
                self._path,
                ort_message(error),
            )
            return again

    def compute(self, batch: StagedBatch) -> None:
        """Run the model on a loaded batch."""
        assert batch.slot is not None
        try:
            binding = self._bound(batch.slot, batch)
            for spec in batch.layout.unknown:
                # Bound for every run: otherwise a run would write to the memory that the previous one allocated.
                binding.bind_output(spec.name, "cpu")
            self._run(binding, batch.slot.graph)
        except BaseException:
            self._release(batch)
            raise

    def _bound(self, slot: DeviceSlot, batch: StagedBatch) -> Any:
        key = batch.key, bool(batch.layout.outputs)
        binding = slot.bindings.get(key)
        if binding is not None:
            return binding
        if len(slot.bindings) >= _MAX_CACHED_SHAPES:
            slot.bindings.clear()
        binding, layout, at = self._binding(), batch.layout, slot.block.address
        device = self._memory.device_type, self._memory.device_id
        for bind, places in ((binding.bind_input, layout.inputs), (binding.bind_output, layout.outputs)):
            for place in places:
                bind(place.spec.name, *device, place.element_type, place.shape, at + place.offset)
        slot.bindings[key] = binding
        return binding

    def fetch(self, batch: StagedBatch) -> dict[str, Any]:
        """Return the outputs of a computed batch, in the model's order. States that are kept are lists of their rows."""
        slot, layout = batch.slot, batch.layout
        assert slot is not None
        try:
            outputs: dict[str, Any] = {}
            states = frozenset(batch.states.values())
            if kept := [place for place in layout.outputs if place.spec.name in states]:
                rows = len(next(batch[name] for name in batch.states))
                outputs.update(self._held.keep(slot.block.address, kept, rows) or {})
            places = [place for place in layout.outputs if place.spec.name not in outputs]
            for start, end in ranges_of(places):
                self._memory.fetch(batch.address + start, slot.block.address + start, end - start)
            outputs.update((place.spec.name, batch.array(place)) for place in places)
            if layout.unknown:
                bound = (*layout.outputs, *layout.unknown)
                values = self._bound(slot, batch).get_outputs()
                for spec, value in zip(bound, values, strict=True):
                    if isinstance(spec, TensorSpec):
                        full = array_of_ortvalue(value, spec)
                        outputs[spec.name] = full if batch.rows is None else full[: batch.rows]
        finally:
            self._release(batch)
        return {spec.name: outputs[spec.name] for spec in self._signature.outputs}

    def place_copies(self, inputs: Mapping[str, Array], *, outputs: bool = True) -> StagedBatch | None:
        """Return memory for a batch with copies of these inputs; None if there is none."""
        batch = self.place({name: array.shape for name, array in inputs.items()}, outputs=outputs)
        if batch is not None:
            for name, array in batch.items():
                array[...] = inputs[name]
        return batch

    def use_captured(self, shapes: CapturedShapes) -> None:
        """Run batches as captured graphs from now on, padded if necessary."""
        self._captured_shapes = shapes
        self._layouts.clear()

    def capture(self, shapes: Mapping[str, Shape], numbers: Sequence[int], check: Callable[[], None]) -> None:
        """Create a slot for batches of these shapes for each of the graph numbers.

        `check` runs such batches. The first run captures the graph, and an exception ends the capture. No other batch
        may run meanwhile.
        """
        key = tuple(shapes[spec.name] for spec in self._signature.inputs)
        layout = tensor_layout_for(self._signature, dict(shapes), outputs=self._outputs_known)
        if layout.unknown:
            names = ", ".join(repr(spec.name) for spec in layout.unknown)
            raise CaptureError(f"the shape of output {names} is only known once the model has run")
        slots: deque[DeviceSlot] = deque()
        try:
            for number in numbers:
                slot = DeviceSlot(self._memory.device(size_class(layout.nbytes)), number)
                self._captured_slots[key] = deque([slot])
                check()
                slots.append(slot)
        finally:
            self._captured_slots[key] = slots

    def _release(self, batch: StagedBatch) -> None:
        slot, batch.slot = batch.slot, None
        if slot is None:
            return
        if slot.graph is None:
            self._device.release(slot)
        else:
            self._captured_slots[batch.key].append(slot)


def _pad(batch: StagedBatch) -> None:
    """Fill the padding rows of arrays with copies of the last row, which is valid input for the model."""
    if batch.rows is None:
        return
    for place in batch.layout.inputs:
        if place.spec.name in batch.states:
            continue
        full: Array = np.ndarray(place.shape, place.spec.datatype.storage, batch.root, place.offset)
        full[batch.rows :] = full[batch.rows - 1]


def host_arrays(batch: Mapping[str, Any]) -> dict[str, Array]:
    """Return the inputs of a filled batch as arrays in the host's memory."""
    return {
        name: np.concatenate([host_array(tensor) for tensor in value]) if isinstance(value, list) else value
        for name, value in batch.items()
    }


def array_of_ortvalue(value: Any, spec: TensorSpec) -> Array:
    """Return the array in an OrtValue, in `storage` form."""
    if spec.datatype.name != "BF16":
        return np.asarray(value.numpy())
    # ONNX Runtime returns no numpy array for bfloat16, so its bits are copied.
    shape = value.shape()
    bits = ctypes.string_at(value.data_ptr(), math.prod(shape) * spec.datatype.size)
    return np.frombuffer(bits, spec.datatype.storage).reshape(shape)
