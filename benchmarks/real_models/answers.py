"""Answers of concurrent requests, compared with ONNX Runtime alone on the original file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime

from python_models.calls import Call
from real_models.catalogue import Array, RealModel
from serving.load import UNARY_PATH
from serving.probe import OPTIONS
from serving.servers import HOST
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import datatype, decode_raw

Outputs = Mapping[str, Array]

_IN_FLIGHT = 32
_SECONDS = 300
# Share of a value, and of the greatest value of the output, by which sums of float32 in another order may differ.
_RELATIVE = 1e-3
# Least share of the requests whose answers differ from those of all others.
_DIFFERENT = 0.9


class Reference:
    """A model's file in ONNX Runtime alone, with requests and their right outputs. Single-threaded."""

    def __init__(self, model: RealModel, path: Path, distinct: int) -> None:
        self.model = model.name
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        self.shapes = {each.name: each.shape for each in session.get_inputs()}
        names = [each.name for each in session.get_outputs()]
        self.calls: list[Call] = []
        self.outputs: list[Outputs] = []
        for number in range(distinct):
            inputs = model.request(number)
            self.outputs.append(dict(zip(names, session.run(names, dict(inputs)), strict=True)))
            self.calls.append(Call(model.name, inputs, self.outputs[-1][names[0]]))
        different = sum(
            not any(same(outputs, other) for other in self.outputs[:number])
            for number, outputs in enumerate(self.outputs)
        )
        if different < distinct * _DIFFERENT:
            raise ValueError(
                f"{model.name}: {different} of {distinct} answers differ: swapped ones would not be seen"
            )


def same(got: Outputs, expected: Outputs) -> bool:
    """Return whether all outputs have the right shape, and values that differ by rounding at most."""
    return got.keys() == expected.keys() and all(
        got[name].shape == right.shape
        and np.allclose(got[name], right, _RELATIVE, _RELATIVE * np.abs(right).max(), equal_nan=True)
        for name, right in expected.items()
    )


def outputs_of(response: pb.ModelInferResponse) -> Outputs:
    """Return the arrays of an answer with raw contents."""
    return {
        said.name: decode_raw(raw, datatype(said.datatype), tuple(said.shape))
        for said, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def count(reference: Reference, port: int, calls: int) -> tuple[int, Sequence[str]]:
    """Send the requests in turn, `calls` in all; return the number of right answers, and what was wrong with others."""
    messages = [call.message() for call in reference.calls]
    with (
        grpc.insecure_channel(f"{HOST}:{port}", options=OPTIONS) as channel,
        ThreadPoolExecutor(_IN_FLIGHT) as callers,
    ):
        infer: Any = channel.unary_unary(UNARY_PATH)

        def ask(number: int) -> str:
            at = number % len(messages)
            try:
                answer = infer(messages[at], timeout=_SECONDS)
            except grpc.RpcError as error:
                return f"request {number}: {error}"
            if same(outputs_of(pb.ModelInferResponse.FromString(answer)), reference.outputs[at]):
                return ""
            return f"request {number}: not the answer of ONNX Runtime alone"

        wrong = [said for said in callers.map(ask, range(calls)) if said]
    return calls - len(wrong), wrong
