"""config.pbtxt is read with errors that give the position, and completed with what is really used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.server.rig import signature, spec

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.instance_groups import instance_groups
from tensorferry.server.models.config_pbtxt.io_mapping import io_mapping_of
from tensorferry.server.models.config_pbtxt.pbtxt import (
    BatchingDecision,
    complete_config,
    config_text,
    parse_config,
    read_config,
)
from tensorferry.server.runtime.devices import AvailableDevices
from tensorferry.server.signature import Signature

ONNX = signature(
    spec("x", "FP32", "batch", 3, "n"),
    spec("s", "BYTES", "batch"),
    outputs=(spec("y", "INT64", "batch"), spec("z", "BF16", "batch", "n")),
)


def completed(
    text: str | None,
    onnx: Signature = ONNX,
    *,
    most: int = 8,
    merges: bool = True,
    scalars_as_one: bool = True,
    **options: Any,
) -> ModelConfig:
    given = parse_config(text, "test") if text is not None else None
    directory = Path("m") if scalars_as_one else None
    return complete_config(
        given or ModelConfig(),
        ModelSource("m", Path("m", "1", "model.onnx"), directory=directory),
        onnx,
        BatchingDecision(most, merges, ""),
        instance_groups(given, "m", AvailableDevices()),
        ServerConfig((), **options),
    )


# Reading.


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("max_batch_size: 8\nbatch: 4\n", "line 2, column 1", 'no field named "batch"'),
        ('\n\ninput { name: "x" data_type: TYPE_FLOAT }', "line 3", "no value named TYPE_FLOAT"),
        ("dynamic_batching {", "line 1", 'Expected "}"'),
    ],
)
def test_a_syntax_error_is_reported_with_file_line_and_field(
    text: str, position: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(text)
    with pytest.raises(ModelConfigError) as caught:
        read_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {position}")
    assert reason in message
    # The position is given once.
    assert message.count(" : ") == 0


@pytest.mark.parametrize("content", [None, b"name: \xff"])
def test_a_missing_or_binary_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"config\.pbtxt cannot be read"):
        read_config(path)


# Completion.


def test_without_a_file_everything_is_filled_in() -> None:
    assert completed(None) == parse_config(
        """
        name: "m" platform: "onnxruntime_onnx" backend: "onnxruntime" default_model_filename: "model.onnx"
        version_policy { latest { num_versions: 1 } }
        max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] }
        input { name: "s" data_type: TYPE_STRING dims: 1 reshape { shape: [ ] } }
        output { name: "y" data_type: TYPE_INT64 dims: 1 reshape { shape: [ ] } }
        output { name: "z" data_type: TYPE_BF16 dims: -1 }
        dynamic_batching { preferred_batch_size: 8 }
        instance_group { name: "m" kind: KIND_CPU count: 1 }
        """,
        "test",
    )


def test_an_unbatched_model_has_complete_dims_and_no_scheduler() -> None:
    onnx = signature(spec("x", "FP32", 1, "n"), spec("c", "INT32"), outputs=(spec("y", "FP32", 1),))
    config = completed(None, onnx, most=0, merges=False)
    assert [list(tensor.dims) for tensor in [*list[Any](config.input), *config.output]] == [[1, -1], [1], [1]]
    assert not config.input[1].HasField("reshape")
    assert config.max_batch_size == 0
    assert config.WhichOneof("scheduling_choice") is None


def test_generated_batching_follows_the_server_options() -> None:
    config = completed(
        "max_batch_size: 8",
        max_queue_delay=0.0025,
        preferred_batch_sizes=(4, 16),
        priority_weights=(8, 2, 1),
        default_priority=2,
    )
    assert (
        config.dynamic_batching
        == parse_config(
            """dynamic_batching { max_queue_delay_microseconds: 2500 preferred_batch_size: 4 priority_levels: 3
        default_priority_level: 2 }""",
            "test",
        ).dynamic_batching
    )


def test_requests_that_share_no_batch_keep_the_queue_settings_of_the_file() -> None:
    batching = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 9 %s }"
    assert not completed(batching % "", merges=False).HasField("dynamic_batching")
    policy = "default_queue_policy { max_queue_size: 3 }"
    config = completed(batching % policy, merges=False)
    assert config.dynamic_batching == parse_config(f"dynamic_batching {{ {policy} }}", "").dynamic_batching


@pytest.mark.parametrize(
    "text",
    [
        "version_policy { specific { versions: [ 1, 3 ] } }",
        'output { name: "z" data_type: TYPE_BF16 dims: -1 label_filename: "labels.txt" }',
    ],
)
def test_given_fields_are_kept(text: str) -> None:
    given, config = parse_config(text, "test"), completed(text)
    for field, value in given.ListFields():
        assert getattr(config, field.name) == value


@pytest.mark.parametrize(
    ("text", "most", "merges"),
    [
        (None, 8, True),
        ("dynamic_batching { max_queue_delay_microseconds: 5 }", 8, True),
        ("max_batch_size: 8", 8, False),
        ("instance_group { count: 2 kind: KIND_AUTO gpus: 1 }", 8, True),
    ],
)
def test_a_completed_configuration_is_complete(text: str | None, most: int, merges: bool) -> None:
    """Completing it again changes nothing, also not a model outside a repository, which keeps its scalars."""
    once = completed(text, most=most, merges=merges, scalars_as_one=False)
    assert text or not once.input[1].dims
    again = completed(config_text(once), most=most, merges=merges)
    assert again == once
    assert io_mapping_of(again, ONNX) == io_mapping_of(once, ONNX)
