"""Default padding of an ONNX model: the axis is found in the file, or the reason why there is none is given."""

from __future__ import annotations

import pytest

from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.models.row_padding import DefaultPadding, RaggedInput, default_padding
from tensorferry.server.signature import Signature, TensorSpec

IDS, MASK = RaggedInput((16, 32), 1), RaggedInput((16, 32), 0)


def signature(**dims: tuple[int | str, ...]) -> Signature:
    inputs = tuple(TensorSpec(name, DATATYPES["INT64"], each) for name, each in dims.items())
    return Signature(inputs, (TensorSpec("y", DATATYPES["FP32"], ("batch", 384)),))


def test_inputs_with_one_named_axis_are_padded() -> None:
    given = signature(ids=("batch", "seq"), mask=("batch", "seq"), scale=("batch", 1))
    assert default_padding(given, {"ids": IDS, "mask": MASK}) == DefaultPadding(
        PadLengths("seq", (16, 32)), (("ids", "1"), ("mask", "0"))
    )


def test_of_two_functions_the_shorter_lengths_are_used() -> None:
    given = signature(ids=("batch", "seq"), mask=("batch", "seq"))
    padding = default_padding(given, {"ids": IDS, "mask": RaggedInput((8, 16), 0)})
    assert padding.pad_lengths == PadLengths("seq", (8, 16))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (signature(ids=("batch", ""), mask=("batch", "")), "axis 1 of input 'ids' has no name in the file"),
        (signature(ids=("batch", 128), mask=("batch", 128)), "input 'ids' has the fixed length 128"),
        (signature(ids=("batch",), mask=("batch",)), "axis 1 of input 'ids' has no name"),
        (signature(ids=("batch", "a"), mask=("batch", "b")), "axis 1 has different names"),
        (
            signature(ids=("batch", "seq"), mask=("batch", "seq"), types=("batch", "seq")),
            "input 'types' also has the axis 'seq', and no pad value",
        ),
        (signature(x=("batch", "seq")), "it reads no rows of different lengths"),
    ],
)
def test_the_reason_is_given_if_there_is_no_padding(given: Signature, reason: str) -> None:
    padding = default_padding(given, {"ids": IDS, "mask": MASK})
    assert padding.pad_lengths is None
    assert reason in padding.reason
