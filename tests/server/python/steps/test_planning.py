"""Planning of pipelines: stages, signatures, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from tensorferry.batcher import Padding, PadInput
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.pbtxt import BatchingDecision
from tensorferry.server.models.config_pbtxt.settings import ModelSettings
from tensorferry.server.python.steps.loaded_step import LoadedStep
from tensorferry.server.python.steps.planning import StepBinding, place, plan_pipeline
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.signature import Signature, TensorSpec

Dims = tuple[int | str, ...]


def spec(name: str, dims: Dims = ("",), datatype: str = "FP32", *, binary: bool = False) -> TensorSpec:
    return TensorSpec(name, DATATYPES[datatype], dims, binary=binary)


def step(
    name: str,
    inputs: Mapping[str, Dims] | list[str],
    outputs: Mapping[str, Dims] | list[str],
    *,
    reads: Mapping[str, str] | None = None,
    gives: Mapping[str, str] | None = None,
    batch: int = 32,
    devices: tuple[str, ...] = ("cpu",),
    merges: bool = True,
    padding: Padding | None = None,
    python: bool = False,
) -> StepBinding:
    shapes_in = inputs if isinstance(inputs, Mapping) else dict.fromkeys(inputs, ("",))
    shapes_out = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs, ("",))
    signature = Signature(
        tuple(spec(tensor, dims) for tensor, dims in shapes_in.items()),
        tuple(spec(tensor, dims) for tensor, dims in shapes_out.items()),
    )
    loaded = LoadedStep(
        name=name,
        signature=signature,
        settings=ModelSettings(batch, merges, 0.0, (), (1,), False, 0, (), devices, OrtOptions()),
        config=ModelConfig(),
        decision=BatchingDecision(batch, merges, ""),
        batching="",
        make_instance=cast(Any, None),
        run_seconds={},
        padding=padding,
        python=python,
    )
    return place(name, signature, reads or {}, gives or {}, loaded)


def stages(*steps: StepBinding, outputs: list[str] | None = None) -> list[str]:
    return [stage.name for stage in plan_pipeline("p", steps, outputs).stages]


A = step("a", ["x"], ["y"])


def test_an_input_of_clients_beside_an_unread_output_is_said_to_be_one() -> None:
    other = step("b", ["why"], ["z"], reads={"why": "why"})
    assert [each.name for each in plan_pipeline("p", [A, other], None).signature.inputs] == ["x", "why"]
    another_type = step("b", {"why": ("", 4)}, ["z"])
    assert [each.name for each in plan_pipeline("p", [A, another_type], None).signature.inputs] == [
        "x",
        "why",
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"batch": 8},
        {"devices": ("cpu", "cpu")},
        {"merges": False},
        {"padding": Padding((4,), {"y": PadInput(1, 0)})},
    ],
)
def test_batches_are_formed_again_where_steps_differ(changed: Any) -> None:
    plan = plan_pipeline(
        "p", [step("a", ["x"], {"y": ("", "")}), step("b", {"y": ("", "")}, ["z"], **changed)], None
    )
    assert [stage.name for stage in plan.stages] == ["a", "b"]
    assert plan.stages[0].outputs == ("y",)


def test_a_function_whose_rows_may_differ_in_length_ends_its_stage() -> None:
    ragged = {"y": cast(Dims, ("", ""))}
    assert stages(step("a", ["x"], ragged, python=True), step("b", ragged, ["z"])) == ["a", "b"]
    # An ONNX model gives rows of one length for inputs of one shape.
    assert stages(step("a", ["x"], ragged), step("b", ragged, ["z"])) == ["a+b"]


def test_a_step_after_a_padded_one_shares_its_stage_unless_it_sees_padding() -> None:
    ids = {"ids": cast(Dims, ("", "n"))}
    padding = Padding((4,), {"ids": PadInput(1, 0)}, {})
    padded = step("a", ids, ["y"], padding=padding)
    assert stages(padded, step("b", ["y"], ["z"])) == ["a+b"]
    assert stages(padded, step("b", {"y": ("",), **ids}, ["z"])) == ["a", "b"]
    longer = step("a", ids, {"y": ("", "n")}, padding=Padding((4,), {"ids": PadInput(1, 0)}, {"y": 1}))
    assert stages(longer, step("b", {"y": ("", "n")}, ["z"])) == ["a", "b"]


def test_tensors_are_renamed() -> None:
    plan = plan_pipeline(
        "p", [A, step("a2", ["x"], ["y"], reads={"x": "y"}, gives={"y": "twice"})], ["twice", "y"]
    )
    assert str(plan.signature) == "(x: FP32[-1]) -> (twice: FP32[-1], y: FP32[-1])"
    assert plan.stages[0].outputs == ("y", "twice")


def test_branches_read_any_earlier_tensor() -> None:
    left, right = step("left", ["y"], ["l"], batch=8), step("right", ["y"], ["r"], batch=4)
    plan = plan_pipeline("p", [A, left, right, step("join", ["l", "r"], ["z"])], None)
    assert [(stage.name, stage.inputs) for stage in plan.stages] == [
        ("a", ("x",)),
        ("left", ("y",)),
        ("right", ("y",)),
        ("join", ("l", "r")),
    ]


def test_inputs_without_rows_are_shared() -> None:
    scaled = step("scaled", {"x": ("", 3), "k": ()}, ["y"])
    assert plan_pipeline("p", [scaled, step("b", ["y"], ["z"])], None).stages[0].shared == {"k"}


@pytest.mark.parametrize(
    ("steps", "outputs", "message"),
    [
        ([A, step("b", ["y"], ["y2"], gives={"y2": "y"})], None, "gives the tensor 'y', which step 'a' gives already"),
        ([A, step("b", ["y"], ["x"])], None, "step 'a' reads 'x', which only a later step gives"),
        ([step("a", ["x"], ["x"]), step("b", ["x"], ["z"])], None, "step 'a' reads 'x' and gives a tensor of the same name"),
        ([step("one", [], ["x"]), step("b", ["x"], ["y"])], None, "has no inputs; its first step must read one"),
        ([A], ["q"], "has the output 'q', which no step gives; they give y"),
        ([A, step("b", ["x"], ["unused"], batch=8)], ["y"], "nothing reads the outputs of step 'b', unused"),
        ([A, step("b", ["why"], ["z"])], None, r"step 'b' reads 'why', .* nothing reads 'y' of step 'a'.* inputs=\{'why': 'y'\}"),
        ([A, step("b", {"y": ("", 4)}, ["z"])], None, r"tensor 'y': step 'a' gives FP32\[-1\], but step 'b' takes FP32\[-1, 4\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    steps: list[StepBinding], outputs: list[str] | None, message: str
) -> None:
    with pytest.raises(StartError, match=message):
        plan_pipeline("p", steps, outputs)


def test_a_model_alone_may_have_no_inputs() -> None:
    plan = plan_pipeline("p", [step("one", [], ["x"])], None)
    assert (plan.signature.inputs, plan.stages[0].inputs, plan.stages[0].outputs) == ((), (), ("x",))


def test_text_and_bytes_do_not_fit() -> None:
    one = place("one", Signature((spec("x"),), (spec("t", datatype="BYTES"),)), {}, {})
    two = place("two", Signature((spec("t", datatype="BYTES", binary=True),), (spec("z"),)), {}, {})
    with pytest.raises(StartError, match=r"step 'one' gives STRING\[-1\], but step 'two' takes BYTES\[-1\]"):
        plan_pipeline("p", [one, two], None)


def test_a_mapping_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(StartError, match="step 'a' has no input 'q'; it has x"):
        step("a", ["x"], ["y"], reads={"q": "x"})
    with pytest.raises(StartError, match="step 'a' has no output 'q'; it has y"):
        step("a", ["x"], ["y"], gives={"q": "x"})
