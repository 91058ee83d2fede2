"""Inputs in regions of shared memory."""

from __future__ import annotations

from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.shared_memory.regions import Regions


def names(regions: Regions) -> list[str]:
    return [region.name for region in regions.regions()]


def input_in(region: Any = "r", nbytes: Any = 16, offset: Any = None) -> Any:
    """An input in a region. A dict stands for a parameter's fields."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="x")
    for key, kind, value in (
        ("shared_memory_region", "string_param", region),
        ("shared_memory_byte_size", "int64_param", nbytes),
        ("shared_memory_offset", "int64_param", offset),
    ):
        if value is not None:
            given = value if isinstance(value, dict) else {kind: value}
            tensor.parameters[key].CopyFrom(pb.InferParameter(**given))
    return tensor
