"""Ensembles obey Triton's rules: each mistake in a configuration is refused, most with Triton's words."""

from __future__ import annotations

import pytest

from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.ensembles import (
    check_composing_models,
    named_models,
    ordered_steps,
)
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config

IMAGE = 'input { name: "image" data_type: TYPE_FP32 dims: 3 }'
LABEL = 'output { name: "label" data_type: TYPE_FP32 dims: [ 4 ] }'
FIRST = 'step { model_name: "a" model_version: -1 input_map { key: "x" value: "image" } output_map { key: "y" value: "mid" } }'
SECOND = 'step { model_name: "b" model_version: 3 input_map { key: "u" value: "mid" } output_map { key: "v" value: "label" } }'
A = """max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: -1 }"""
B = """max_batch_size: 4 input { name: "u" data_type: TYPE_FP32 dims: 5 } output { name: "v" data_type: TYPE_FP32 dims: 4 }"""


def ensemble(*steps: str, fields: str = "max_batch_size: 4", io: str = IMAGE + LABEL) -> str:
    return f'name: "e" platform: "ensemble" {fields} {io} ensemble_scheduling {{ {" ".join(steps)} }}'


GOOD = ensemble(FIRST, SECOND)


def test_steps_are_ordered_by_their_tensors() -> None:
    assert ordered_steps(parse_config(GOOD, "test")) == (0, 1)
    reverse = parse_config(ensemble(SECOND, FIRST), "test")
    assert ordered_steps(reverse) == (1, 0)
    assert named_models(reverse) == [("b", "3"), ("a", "")]


LOOP = SECOND.replace('"mid"', '"label"').replace('value: "label" } }', 'value: "mid" } }')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace('platform: "ensemble"', ""), "ensemble scheduling cannot be set for model 'e' whose platform is not"),
        ('name: "e" platform: "ensemble"', "ensemble scheduling must be set for ensemble e whose platform is ensemble"),
        (ensemble(), "must specify 'step' for ensemble 'e'"),
        (ensemble(*[FIRST] * 257), "ensemble 'e' has 257 steps; this server allows at most 256"),
        (GOOD.replace("model_version: 3", "model_version: -2"), "model_version of step 1 of ensemble 'e' is -2"),
        (ensemble(FIRST, SECOND, fields="max_batch_size: -1"), "'max_batch_size' must be non-negative for e, got -1"),
        (
            ensemble(FIRST, SECOND, fields="instance_group { }"),
            "instance group should not be specified for ensemble 'e'",
        ),
        (ensemble(FIRST, FIRST), "ensemble tensor 'mid' can appear in an output map only once for ensemble 'e' step 1"),
        (ensemble(SECOND, io=LABEL), "output 'label' for ensemble 'e' is not written: .* 'mid', is not connected"),
        (ensemble(FIRST, SECOND, io=IMAGE + LABEL + IMAGE.replace("image", "extra")), "ensemble input 'extra' .*is not used"),
        (ensemble(FIRST, SECOND, io=IMAGE + LABEL.replace("label", "mid")), "ensemble tensor 'label' is unused in ensemble 'e'"),
        (GOOD.replace("dims: 3 }", "dims: 3 optional: true }"), "input 'image' of ensemble 'e' is optional"),
        (
            GOOD.replace("dims: 3 }", "dims: 3 reshape { shape: 3 } }"),
            "input 'image' of ensemble 'e' has a reshape",
        ),
        (ensemble(FIRST.replace('"image"', '"label"'), SECOND, io=LABEL), "the steps 'a', 'b' wait for each other"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_configuration_is_refused(text: str, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        ordered_steps(parse_config(text, "test"))


@pytest.mark.parametrize(
    ("text", "a", "message"),
    [
        (
            GOOD.replace("max_batch_size: 4", "max_batch_size: 5"),
            A,
            "ensemble e allows maximum batch size 5, but it contains model b which only allows maximum batch size to be 4",
        ),
        (GOOD.replace('key: "x"', 'key: "z"'), A, "ensemble tensor image is mapping to non-existing input z in model a"),
        (
            GOOD,
            A + 'input { name: "w" data_type: TYPE_FP32 dims: 1 }',
            "in ensemble e, input w in model a is not mapped to any ensemble tensors",
        ),
        (
            GOOD.replace("TYPE_FP32 dims: 3", "TYPE_UINT8 dims: 3"),
            A,
            "in ensemble e, ensemble tensor image: inconsistent data type: TYPE_UINT8 is inferred from model e while TYPE_FP32 is "
            "inferred from model a",
        ),
        (
            GOOD.replace("dims: 3", "dims: [ 2 ]"),
            A,
            r"image: inconsistent shape: \[-1,2\] is inferred from model e while \[-1,3\] is inferred from model a",
        ),
    ],
)  # fmt: skip
def test_models_that_do_not_fit_are_refused(text: str, a: str, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        check_composing_models(parse_config(text, "test"), [parse_config(a, "a"), parse_config(B, "b")])
