"""Every field of a configuration is used, passed on, warned about or refused; none is ignored silently."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.models.config_pbtxt.supported_fields import RULES, check_fields

DOCS = Path(__file__).resolve().parents[4] / "docs" / "reference" / "model_config.md"


def fields(descriptor: Any, prefix: str = "") -> Iterator[str]:
    """Yield every field of a configuration, but not the fields inside one with a rule."""
    for field in descriptor.fields:
        path = prefix + field.name
        if path in RULES or field.message_type is None:
            yield path
        else:
            yield from fields(field.message_type, path + ".")


def test_every_field_has_a_rule_and_every_rule_a_field() -> None:
    assert sorted(fields(ModelConfig.DESCRIPTOR)) == sorted(RULES)


def test_the_documentation_has_the_treatment_of_every_field() -> None:
    table = DOCS.read_text().partition("## Every field")[2]
    documented = dict(re.findall(r"^\| `([\w.]+)` \| ([\w ]+) \|", table, re.MULTILINE))
    assert documented == {path: rule.treatment.value for path, rule in RULES.items()}


# Configurations with fields of each form: a value, a message, a list and a map.
WARNED = {
    "sequence_batching.oldest.max_candidate_sequences": "sequence_batching { oldest { max_candidate_sequences: 4 } }",
    "runtime": 'runtime: "libtriton_onnxruntime.so"',
    "optimization.cuda.graph_spec.graph_lower_bound": "optimization { cuda { graph_spec { graph_lower_bound { } } } }",
    "optimization.input_pinned_memory": "optimization { input_pinned_memory { enable: false } }",
    "instance_group.host_policy": 'instance_group { host_policy: "numa_0" }',
    "cc_model_filenames": 'cc_model_filenames { key: "8.6" value: "model86.onnx" }',
}
REFUSED = {
    "input.allow_ragged_batch": "input { allow_ragged_batch: true }",
    "batch_input": 'batch_input { kind: BATCH_ITEM_SHAPE target_name: "b" data_type: TYPE_FP32 source_input: "x" }',
    "sequence_batching.iterative_sequence": "sequence_batching { iterative_sequence: true }",
    "model_transaction_policy.decoupled": "model_transaction_policy { decoupled: true }",
}


@pytest.mark.parametrize("path", WARNED)
def test_a_field_without_effect_on_answers_gives_a_warning(path: str) -> None:
    (warning,) = check_fields(parse_config(WARNED[path], "test"), "m")
    assert warning == f"the configuration of model 'm' has {path}: {RULES[path].message}"
    assert RULES[path].message


@pytest.mark.parametrize("path", REFUSED)
def test_a_field_that_would_change_answers_is_refused(path: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        check_fields(parse_config(REFUSED[path], "test"), "m")
    assert str(caught.value) == f"the configuration of model 'm' has {path}: {RULES[path].message}"


@pytest.mark.parametrize("text", ["", "response_cache { }"])
def test_an_empty_field_is_not_set(text: str) -> None:
    assert check_fields(parse_config(text, "test"), "m") == []


def test_a_warning_for_several_groups_is_given_once() -> None:
    text = 'instance_group { host_policy: "a" } instance_group { host_policy: "b" }'
    assert len(check_fields(parse_config(text, "test"), "m")) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('platform: "tensorrt_plan"', "unexpected platform type 'tensorrt_plan' for m: .* is 'onnxruntime_onnx'"),
        ('backend: "python"', "unexpected backend type 'python' for m: the backend of ONNX models is 'onnxruntime'"),
        # protobuf accepts any number, in text and in the JSON that clients send.
        ("instance_group { kind: 99 gpus: 0 }", "has instance_group.kind: 99; it must be one of KIND_AUTO, "),
        ('model_warmup { inputs { key: "x" value { data_type: 99 } } }', "has model_warmup.inputs.data_type: 99; "),
    ],
)  # fmt: skip
def test_other_backends_and_undefined_values_are_refused(text: str, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        check_fields(parse_config(text, "test"), "m")
