"""Batches in memory of our own: joined into page-locked memory, copied to the device, run there, copied back.

A batch goes through four steps. `place` hands out arrays in a block of host memory, which the caller fills
with the inputs. `load` copies them to a slot, which is a block of the device's memory. `compute` runs the
model on the slot, whose addresses are bound once. `fetch` copies the outputs back into the host's block, gives
them out as arrays there, and frees the slot for another batch. Only `compute` needs the device's kernels: the
batcher has one batch compute while another is loaded or fetched.

The host's block is free again when nobody has an array of it any more, neither inputs nor outputs nor views of
them: it is watched by a weak reference. So an answer that leaves late keeps its numbers, and a batch that fails
half way loses no memory. Where too many are kept, `place` says no, and the caller uses memory of its own.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tensorferry.server.gpu.cuda_graphs import CapturedShapes
from tensorferry.server.gpu.pinned_memory import DeviceMemory, MemoryBlock
from tensorferry.server.gpu.tensor_layout import Shape, TensorLayout, TensorPlacement, tensor_layout_for
from tensorferry.server.signature import Signature, TensorSpec

_log = logging.getLogger("tensorferry.server")

Array = npt.NDArray[Any]

# Of one session, on the host and on the device each.
MAX_BYTES = 1 << 30
# Shapes whose layouts, and whose bindings in a slot, are kept.
_MAX_CACHED_SHAPES = 256


class CaptureError(Exception):
    """A model cannot be captured as a CUDA graph; the message says why."""


class _Sized(Protocol):
    """What a pool keeps."""

    @property
    def nbytes(self) -> int:
        """Its size."""


_T = TypeVar("_T", bound=_Sized)


class BufferPool(Generic[_T]):
    """Memory for use again, in pieces of some sizes, all together at most `most_bytes`. Thread-safe."""

    def __init__(self, allocate: Callable[[int], _T], most_bytes: int) -> None:
        self._allocate = allocate
        self._most_bytes = most_bytes
        # Guards _bytes and the keys of _free; pieces are allocated under it. `give` does not hold it: weak
        # references call that, which may interrupt any line, also those here.
        self._lock = threading.Lock()
        self._bytes = 0
        self._free: dict[int, deque[_T]] = {}

    def take(self, nbytes: int) -> _T | None:
        """A piece of at least so many bytes, with anything in it; None when there is none to be had."""
        size = _size_class(nbytes)
        kept = _popped(self._free.get(size))
        if kept is not None:
            return kept
        with self._lock:
            self._free.setdefault(size, deque())
            if self._bytes + size > self._most_bytes:
                for pieces in self._free.values():
                    while (piece := _popped(pieces)) is not None:
                        self._bytes -= piece.nbytes
            if self._bytes + size > self._most_bytes:
                return None
            try:
                kept = self._allocate(size)
            except (MemoryError, RuntimeError) as error:
                _log.warning("no memory of %d bytes for a batch, which goes without: %s", size, error)
                return None
            self._bytes += size
            return kept

    def give(self, piece: _T) -> None:
        """The piece is not used any more."""
        self._free[piece.nbytes].append(piece)


def _popped(pieces: deque[_T] | None) -> _T | None:
    # Not looked at first: another thread may take the last.
    try:
        return pieces.popleft() if pieces is not None else None
    except IndexError:
        return None


def _size_class(nbytes: int) -> int:
    """So that pieces fit again; at most a quarter is wasted, where it is more than a few pages."""
    step = 1 << max(12, (nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class DeviceSlot:
    """A block of the device's memory with the bindings to it, by the inputs' shapes and whether outputs are known.

    One of a captured graph has its number, and is for one shape alone.
    """

    __slots__ = ("bindings", "block", "graph")

    def __init__(self, block: MemoryBlock, graph: int | None = None) -> None:
        self.block = block
        self.graph = graph
        self.bindings: dict[tuple[tuple[Shape, ...], bool], Any] = {}

    @property
    def nbytes(self) -> int:
        """Of its block."""
        return self.block.nbytes


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How batches of some shapes lie. `key` are those of the layout; `rows` their own where it has room for more."""

    layout: TensorLayout
    key: tuple[Shape, ...]
    rows: int | None


_NOT_PLANNED = BatchLayout(TensorLayout((), (), (), 0, 0), (), None)


class StagedBatch(dict[str, Array]):
    """The inputs of a batch, to be filled; see `BatchLayout` for `layout`, `key` and `rows`."""

    __slots__ = ("address", "key", "layout", "root", "rows", "slot")

    def __init__(self, plan: BatchLayout, root: Any, address: int) -> None:
        self.layout = plan.layout
        self.key = plan.key
        self.rows = plan.rows
        # The arrays keep it, and it keeps the block.
        self.root = root
        self.address = address
        self.slot: DeviceSlot | None = None
        super().__init__([(place.spec.name, self.array(place)) for place in plan.layout.inputs])

    def array(self, place: TensorPlacement) -> Array:
        """A tensor, without the rows that it has room for beyond the batch's."""
        whole: Array = np.ndarray(place.shape, place.spec.datatype.storage, self.root, place.offset)
        return whole if self.rows is None else whole[: self.rows]


class StagingBuffers:
    """The memory of one session's batches, and the steps. Thread-safe; each batch is in one thread's hands.

    `run` runs a binding: as it is, or (`graph`, its number) as a captured graph.
    """

    def __init__(
        self,
        signature: Signature,
        memory: DeviceMemory,
        binding: Callable[[], Any],
        run: Callable[[Any, int | None], None],
        most_bytes: int = MAX_BYTES,
    ) -> None:
        self._signature = signature
        self._memory = memory
        self._binding = binding
        self._run = run
        self._host = BufferPool(memory.host, most_bytes)
        self._device = BufferPool(lambda nbytes: DeviceSlot(memory.device(nbytes)), most_bytes)
        self._plans: dict[tuple[Any, ...], BatchLayout | None] = {}
        self._known = True
        self._ladder: CapturedShapes | None = None
        # Free slots of each rung, of two: one computes while the other is loaded or fetched.
        self._captured: dict[tuple[Shape, ...], deque[DeviceSlot]] = {}

    def place(self, shapes: Mapping[str, Shape], *, outputs: bool = True) -> StagedBatch | None:
        """Memory for a batch whose inputs have these shapes; None when there is none to be had.

        Without `outputs`, their shapes are taken for unknown.
        """
        asked = (*shapes.items(), outputs)
        plan = self._plans.get(asked, _NOT_PLANNED)
        if plan is _NOT_PLANNED:
            if len(self._plans) >= _MAX_CACHED_SHAPES:
                self._plans.clear()
            plan = self._plans[asked] = self._plan(shapes, outputs and self._known)
        if plan is None:
            return None
        block = self._host.take(plan.layout.nbytes)
        if block is None:
            return None
        # Of the block's size, not the layout's: ctypes keeps each type for ever.
        root = (ctypes.c_ubyte * block.nbytes).from_address(block.address)
        weakref.finalize(root, self._host.give, block).atexit = False
        return StagedBatch(plan, root, block.address)

    def _plan(self, given: Mapping[str, Shape], outputs: bool) -> BatchLayout | None:
        """How batches of these shapes lie; None when they cannot be the model's."""
        if given.keys() != {spec.name for spec in self._signature.inputs}:
            return None
        shapes = {spec.name: given[spec.name] for spec in self._signature.inputs}
        if any(len(shapes[spec.name]) != len(spec.dims) for spec in self._signature.inputs):
            return None
        rung = self._ladder.captured_shape(shapes) if self._ladder is not None else None
        rows = None
        if rung is not None and rung != shapes:
            rows = next(iter(shapes.values()))[0]
            shapes = dict(rung)
        return BatchLayout(
            tensor_layout_for(self._signature, shapes, outputs=outputs), tuple(shapes.values()), rows
        )

    def load(self, batch: StagedBatch) -> bool:
        """Copies the inputs to a slot; whether there was one to be had."""
        slot = None if batch.layout.unknown else _popped(self._captured.get(batch.key))
        slot = slot or self._device.take(batch.layout.nbytes)
        if slot is None:
            return False
        batch.slot = slot
        try:
            _pad(batch)
            self._memory.load(slot.block.address, batch.address, batch.layout.input_bytes)
        except BaseException:
            self._release(batch)
            raise
        return True

    def compute(self, batch: StagedBatch) -> None:
        """Runs the model on a batch that is loaded."""
        assert batch.slot is not None
        try:
            binding = self._bound(batch.slot, batch)
            for spec in batch.layout.unknown:
                # Each time: what a run allocated would else be what the next one writes to.
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

    def fetch(self, batch: StagedBatch) -> dict[str, Array]:
        """The outputs of a batch that is computed, in the model's order."""
        slot, layout = batch.slot, batch.layout
        assert slot is not None
        try:
            start = layout.input_bytes
            if layout.nbytes > start:
                self._memory.fetch(batch.address + start, slot.block.address + start, layout.nbytes - start)
            outputs = {place.spec.name: batch.array(place) for place in layout.outputs}
            if layout.unknown:
                bound = (*layout.outputs, *layout.unknown)
                values = self._bound(slot, batch).get_outputs()
                for spec, value in zip(bound, values, strict=True):
                    if isinstance(spec, TensorSpec):
                        whole = array_of_ortvalue(value, spec)
                        outputs[spec.name] = whole if batch.rows is None else whole[: batch.rows]
        finally:
            self._release(batch)
        return {spec.name: outputs[spec.name] for spec in self._signature.outputs}

    def forget_outputs(self) -> None:
        """No output's shape is known in advance any more: the model does not keep to what it declares."""
        self._known = False
        self._plans.clear()

    def placed(self, inputs: Mapping[str, Array], *, outputs: bool = True) -> StagedBatch | None:
        """Memory for a batch, with these inputs copied into it."""
        batch = self.place({name: array.shape for name, array in inputs.items()}, outputs=outputs)
        if batch is not None:
            for name, array in batch.items():
                array[...] = inputs[name]
        return batch

    def use_captured(self, ladder: CapturedShapes | None) -> None:
        """Batches are padded up to the ladder's rungs from now on; without one, captured graphs are forgotten."""
        self._ladder = ladder
        self._plans.clear()
        if ladder is None:
            self._captured.clear()

    def capture(self, shapes: Mapping[str, Shape], numbers: Sequence[int], prove: Callable[[], None]) -> None:
        """Makes slots for batches of these shapes, one for each number, by which their graphs go.

        `prove` runs such batches, the first of which is captured; what it raises ends the capture. No other
        batches may run meanwhile.
        """
        key = tuple(shapes[spec.name] for spec in self._signature.inputs)
        layout = tensor_layout_for(self._signature, dict(shapes), outputs=self._known)
        if layout.unknown:
            names = ", ".join(repr(spec.name) for spec in layout.unknown)
            raise CaptureError(f"the shape of output {names} is only known once the model has run")
        slots: deque[DeviceSlot] = deque()
        try:
            for number in numbers:
                slot = DeviceSlot(self._memory.device(_size_class(layout.nbytes)), number)
                self._captured[key] = deque([slot])
                prove()
                slots.append(slot)
        finally:
            self._captured[key] = slots

    def _release(self, batch: StagedBatch) -> None:
        slot, batch.slot = batch.slot, None
        if slot is None:
            return
        if slot.graph is None:
            self._device.give(slot)
        elif (captured := self._captured.get(batch.key)) is not None:
            captured.append(slot)


def _pad(batch: StagedBatch) -> None:
    """Fills the rows that a batch lacks with its last one: whatever a model takes, it takes twice."""
    if batch.rows is None:
        return
    for place in batch.layout.inputs:
        whole: Array = np.ndarray(place.shape, place.spec.datatype.storage, batch.root, place.offset)
        whole[batch.rows :] = whole[batch.rows - 1]


def array_of_ortvalue(value: Any, spec: TensorSpec) -> Array:
    """The array in a value of ONNX Runtime's, in `storage` form."""
    if spec.datatype.name != "BF16":
        return np.asarray(value.numpy())
    # ONNX Runtime gives no numpy array of bfloat16: its bits are copied out.
    shape = value.shape()
    bits = ctypes.string_at(value.data_ptr(), math.prod(shape) * spec.datatype.size)
    return np.frombuffer(bits, spec.datatype.storage).reshape(shape)
