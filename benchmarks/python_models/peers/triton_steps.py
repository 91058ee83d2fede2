"""Triton with two tiny models, alone and with one or two empty Python steps between them.

`without`, `step` and `two` are ensembles; `bls` is a Python model that calls the two models, with the step in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serving.peers.settings import MODEL_PATH
from serving.peers.triton_peer import BATCHING, add, add_model, serve

_WIDTH = 64
_TENSORS = f"""
input [{{ name: "x" data_type: TYPE_FP32 dims: {_WIDTH} }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: {_WIDTH} }}]
"""


def ensemble(models: Sequence[str]) -> str:
    """Return the configuration of these models, one after the other."""
    tensors = ["x", *(f"hidden{at}" for at in range(len(models) - 1)), "y"]
    steps = ", ".join(
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "x" value: "{tensors[at]}" }} '
        f'output_map {{ key: "y" value: "{tensors[at + 1]}" }} }}'
        for at, model in enumerate(models)
    )
    return f'platform: "ensemble"\n{_TENSORS}\nensemble_scheduling {{ step [ {steps} ] }}'


if __name__ == "__main__":
    add_model(MODEL_PATH / "first.onnx", "first")
    add_model(MODEL_PATH / "second.onnx", "second")
    add_model(Path(__file__).parents[1] / "functions" / "empty.py", "empty")
    add("without", ensemble(["first", "second"]))
    add("step", ensemble(["first", "empty", "second"]))
    add("two", ensemble(["first", "empty", "empty", "second"]))
    add("bls", f'backend: "python"\n{_TENSORS}{BATCHING}', Path(__file__).with_name("triton_bls.py"))
    serve()
