"""Models and regions for fuzzing: a real registry, service and batcher over functions that copy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from support.server.cuda_driver import ScriptedDriver
from support.server.rig import fp32, request, spec

from tensorferry.batcher import Batcher, Padding, PadInput
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.shared_memory.regions import Regions
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.signature import Signature, TensorSpec

REGION_BYTES = 96
# Empty rows cost nothing to send: a request of 65 bytes may fill a queue, and take as many batches.
_MOST_ROWS = 256
# The only handle that the scripted driver accepts; it refuses others, like the real driver.
HANDLE = bytes(range(64))

NUMBERS = (spec("x", "FP32", "batch", 3), spec("n", "INT64", "batch", "k"))
STRINGS = (spec("s", "BYTES", "batch"), spec("b", "BOOL", "batch", 2))
KINDS = tuple(
    spec(name.lower(), name, *(() if name == "INT8" else ("any",)))
    for name in (
        "INT8", "INT16", "INT32", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP64", "BF16", "BYTES",
    )
)  # fmt: skip
TOKENS = (spec("ids", "INT64", "batch", "sequence"),)

# Names with a meaning for the server, for mutation.
WORDS = (
    "numbers", "strings", "alone", "tokens", "1", "2",
    "x", "n", "s", "b", "ids", "x_out", "n_out", "s_out", "b_out", "ids_out", "fp16", "bytes", "bf16_out",
    "FP32", "INT64", "BYTES", "BOOL", "FP16", "BF16", "UINT8", "INT8", "FP64",
    "timeout", "priority", "explain", "classification", "sequence_id", "sequence_start", "sequence_end",
    "triton_enable_empty_final_response", "triton_final_response", "binary_data_output",
    "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "system", "device", "key", "/key",
)  # fmt: skip


def _copies(inputs: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}_out": np.array(array) for name, array in inputs.items()}


def _identity(name: str, specs: tuple[TensorSpec, ...], most: int, **more: Any) -> Model:
    outputs = tuple(TensorSpec(f"{each.name}_out", each.datatype, each.dims) for each in specs)
    batcher = Batcher(
        _copies,
        most,
        name=name,
        padding=more.get("padding"),
        priority_weights=(2, 1) if most else (1,),
        max_queue_size=_MOST_ROWS,
    )
    return Model(name, "1", Signature(specs, outputs), most, "", batcher, **more)


class World:
    """Four models whose outputs are their inputs, and one region of each kind of memory."""

    def __init__(self, directory: Path) -> None:
        self.registry = ModelRegistry()
        padding = Padding((2, 4), {"ids": PadInput(1, 0)}, outputs={"ids_out": 1})
        for model in (
            _identity("numbers", NUMBERS, 4, labels={"x_out": ("zero", "", "two")}),
            _identity("strings", STRINGS, 4),
            _identity("alone", KINDS, 0),
            _identity("tokens", TOKENS, 4, padding=padding),
        ):
            self.registry.mark_ready(model)
        self.registry.mark_complete()
        self.driver = ScriptedDriver(REGION_BYTES, devices=1, handle=HANDLE)
        self.directory = directory
        (directory / "key").write_bytes(bytes(REGION_BYTES))
        self._file = os.open(directory / "key", os.O_RDWR)
        self.regions = Regions(allowed=True, max_bytes=1 << 20, directory=directory, cuda=self.driver)

    def register(self) -> None:
        """Register the regions `system` and `device`."""
        self.regions.register_system("system", "key", 0, REGION_BYTES)
        self.regions.register_cuda("device", HANDLE, 0, REGION_BYTES)

    def fill(self) -> None:
        """Restore the initial content of the regions."""
        content = fp32(REGION_BYTES // 4).tobytes()
        os.pwrite(self._file, content, 0)
        self.driver.content[:] = content

    def check(self) -> None:
        """Check that no region is in use."""
        for region in self.regions.regions():
            assert region.users == 0, f"region {region.name} is held by a request that is done"

    def close(self) -> None:
        """Close the batchers."""
        for model in self.registry.models():
            assert model.batcher.close(), f"a worker of {model.name} did not end"
        self.regions.close()
        os.close(self._file)
        assert self.driver.opened == 0, "device memory is left open"


def numbers(rows: int = 2, *, typed: bool = False, **fields: Any) -> pb.ModelInferRequest:
    """Return a request to `numbers`."""
    arrays = {"x": fp32(rows, 3), "n": np.arange(2 * rows).reshape(rows, 2)}
    return request(arrays, typed=typed, model="numbers", **fields)


def strings(rows: int = 2, *, typed: bool = False, **fields: Any) -> pb.ModelInferRequest:
    """Return a request to `strings`."""
    texts = np.array([f"é{row}" for row in range(rows)], dtype=object)
    arrays = {"s": texts, "b": np.zeros((rows, 2), bool)}
    return request(arrays, typed=typed, model="strings", **fields)


def alone() -> pb.ModelInferRequest:
    """Return a request to `alone`, with two elements of each datatype."""
    message = pb.ModelInferRequest(model_name="alone", id="kinds")
    for each in KINDS:
        shape = [2] if each.dims else []
        message.inputs.add(name=each.name, datatype=each.datatype.name, shape=shape)
        size = each.datatype.size * (2 if each.dims else 1)
        message.raw_input_contents.append(bytes(size) or b"\1\0\0\0a\0\0\0\0")
    return message


def tokens(length: int, **fields: Any) -> pb.ModelInferRequest:
    """Return a request to `tokens` with one row."""
    return request({"ids": np.arange(length).reshape(1, length)}, model="tokens", **fields)


def placed(message: pb.ModelInferRequest, index: int, region: str, offset: int) -> pb.ModelInferRequest:
    """Return the request with one input in a region, as clients send it."""
    parameters = message.inputs[index].parameters
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_offset"].int64_param = offset
    parameters["shared_memory_byte_size"].int64_param = len(message.raw_input_contents[index])
    del message.raw_input_contents[index]
    return message


def output_placed(message: pb.ModelInferRequest, name: str, region: str, nbytes: int) -> pb.ModelInferRequest:
    """Return the request with one output placed in a region."""
    output = message.outputs.add(name=name)
    output.parameters["shared_memory_region"].string_param = region
    output.parameters["shared_memory_byte_size"].int64_param = nbytes
    return message


def classified(message: pb.ModelInferRequest, name: str, count: int) -> pb.ModelInferRequest:
    """Return the request with classes of one output."""
    message.outputs.add(name=name).parameters["classification"].int64_param = count
    return message


def with_parameters(message: pb.ModelInferRequest, **values: Any) -> pb.ModelInferRequest:
    """Return the request with parameters, each of its value's kind."""
    for name, value in values.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    return message


def requests() -> list[pb.ModelInferRequest]:
    """Return good requests of every kind."""
    made = [numbers(rows, id=str(rows)) for rows in (0, 1, 2, 3, 5)]
    made += [numbers(2, typed=True), strings(2), strings(2, typed=True, id="typed"), strings(0), alone()]
    made += [tokens(length, id="t") for length in (0, 1, 2, 3, 4, 5)]
    made += [
        # Large enough that its values are not copied.
        request({"x": fp32(1, 3), "n": np.arange(2500).reshape(1, 2500)}, model="numbers", id="large"),
        classified(numbers(2), "x_out", 2),
        classified(numbers(2, typed=True), "n_out", 1),
        with_parameters(numbers(1), explain=True, priority=1, timeout=10**9),
        with_parameters(tokens(3), explain=True, priority=2),
        with_parameters(numbers(1), sequence_id=1, sequence_start=True, sequence_end=False, custom="x"),
        with_parameters(strings(1), triton_enable_empty_final_response=True),
        placed(numbers(2), 0, "system", 0),
        placed(numbers(2), 1, "device", 8),
        placed(placed(numbers(1), 1, "system", 0), 0, "device", 0),
        output_placed(numbers(2), "n_out", "system", 64),
        output_placed(strings(2), "s_out", "device", 64),
    ]
    return made
