"""Arrays in the memory of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from tensorferry.client.connection.cuda_memory import CudaMemory
from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages import arguments
from tensorferry.client.messages.results import Answer, InferenceResult
from tensorferry.client.messages.shared_layout import Place
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array


class DeviceArray:
    """An input or output in memory of a GPU that the server shares.

    `cupy.asarray(array)`, `torch.as_tensor(array, device="cuda")` and numba use the memory without a
    copy, by `__cuda_array_interface__`, in which BF16 is its bits as uint16. `copy_from` and `numpy`
    copy. The memory is freed at the end of the `with` statement. After it the methods raise
    RuntimeError, and arrays of other libraries that use the memory must not be used.

    `infer` waits for work in the GPU's default stream, as do the copies. Synchronise other streams
    before. The outputs are complete when `infer` returns.

    >>> with client.shared_memory("digits", rows=32, device=0) as memory:
    ...     memory.inputs["image"].copy_from(np.zeros((5, 8, 8), np.uint8))
    ...     memory.infer(rows=5)["probabilities"].numpy().shape
    (5, 10)
    """

    def __init__(self, memory: CudaMemory, place: Place) -> None:
        self._memory = memory
        self._place = place

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self._place.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Datatype as a numpy dtype."""
        return self._place.dtype

    @property
    def device(self) -> int:
        """Number of the GPU."""
        return self._memory.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory, for other libraries: the CUDA array interface, version 3."""
        place, address = self._place, self._memory.address
        return {
            "shape": place.shape,
            "typestr": tensors.datatype(place.datatype).storage.str,
            # The interface asks for 0 if there is no element.
            "data": (address + place.offset if place.nbytes else 0, False),
            "strides": None,
            # No wait is needed: the server's writes are complete.
            "stream": None,
            "version": 3,
        }

    def copy_from(self, array: Array) -> None:
        """Copy a numpy array of the same dtype there: all rows, or the first ones.

        Raises InvalidInput for another dtype or shape.

        >>> with client.shared_memory("digits", rows=32, device=0) as memory:
        ...     memory.inputs["image"].copy_from(np.ones((3, 8, 8), np.uint8))
        ...     int(memory.inputs["image"].numpy()[:3].sum())
        192
        """
        subject = f"copy_from of tensor {self._place.name!r}"
        if not isinstance(array, np.ndarray):
            change = (
                "give np.asarray(value); write arrays of a GPU to cupy.asarray or torch.as_tensor of this one"
            )
            raise InvalidInput(subject, "a numpy array", arguments.shown(array), change)
        place = self._place
        if place.has_rows and array.ndim and array.shape[0] <= place.shape[0]:
            place = place.of_rows(array.shape[0])
        if array.dtype != place.dtype or array.shape != place.shape:
            rows = " or fewer rows" if place.has_rows else ""
            raise InvalidInput(
                subject,
                f"{self.dtype} {list(self.shape)}{rows}",
                f"{array.dtype} {list(array.shape)}",
                "give another array"
                if array.dtype == place.dtype
                else f"use array.astype({self.dtype.name!r})",
            )
        self._memory.write(place.offset, np.ascontiguousarray(array))

    def numpy(self) -> Array:
        """Return a copy in a numpy array.

        >>> with client.shared_memory("digits", rows=2, device=0) as memory:
        ...     copied = memory.infer()["label"].numpy()
        >>> copied.shape, copied.dtype
        ((2,), dtype('int64'))
        """
        array: Array = np.empty(self.shape, self.dtype)
        self._memory.read(self._place.offset, array)
        return array

    def __array__(self, *arguments: Any, **options: Any) -> NoReturn:
        # Otherwise numpy would make an array of one object.
        raise TypeError("a DeviceArray is in the memory of a GPU: call its numpy() for a copy")

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype} {list(self.shape)} on GPU {self.device})"


@dataclass(frozen=True, slots=True, eq=False)
class DeviceResult(Answer[DeviceArray]):
    """One answer in memory of a GPU: a mapping from output name to `DeviceArray`.

    The other fields are those of `InferenceResult`. The next `infer` overwrites the outputs.

    >>> with client.shared_memory("digits", rows=2, device=0) as memory:
    ...     result = memory.infer(request_id="a")
    ...     sorted(result), result.id, result["label"]
    (['label', 'probabilities'], 'a', DeviceArray(int64 [2] on GPU 0))
    """

    def numpy(self) -> InferenceResult:
        """Return the result with copies of the outputs in numpy arrays.

        >>> with client.shared_memory("digits", rows=2, device=0) as memory:
        ...     result = memory.infer().numpy()
        >>> result["probabilities"].shape
        (2, 10)
        """
        copies = {name: array.numpy() for name, array in self.outputs.items()}
        return InferenceResult(self.model_name, self.model_version, self.id, self.parameters, copies)
