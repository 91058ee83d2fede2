"""tritonclient's generated code and ours share a process. test_descriptors shows that their bytes are the same."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "order",
    [
        ("tensorferry.protos", "tritonclient.grpc.service_pb2"),
        ("tritonclient.grpc.service_pb2", "tensorferry.protos"),
    ],
    ids=["ours first", "theirs first"],
)
def test_both_are_imported_in_either_order(order: tuple[str, str]) -> None:
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
import {order[0]}, {order[1]}
from tensorferry.protos import inference_pb2 as ours
from tritonclient.grpc import service_pb2 as theirs
assert theirs.ModelInferRequest(model_name="m").SerializeToString() == ours.ModelInferRequest(model_name="m").SerializeToString()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)
