"""The arguments of the Ray Serve application have the keys of the TOML file, without options of a port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import ConfigError
from tensorferry.server.ray.configuration import configuration


def test_options_and_models() -> None:
    config = configuration({
        "models": ["a.onnx", Path("b.onnx")],
        "max_batch_size": 8,
        "fp16": True,
        "priority-weights": [8, 1],
        "model-control": "none",
    })  # fmt: skip
    assert config.models == (ModelSource("a", Path("a.onnx")), ModelSource("b", Path("b.onnx")))
    assert (config.max_batch_size, config.fp16) == (8, True)
    assert config.priority_weights == (8, 1)


def test_tables_of_models() -> None:
    config = configuration(
        {"models": {"a": {"path": "x.onnx", "max-batch-size": 8}, "b": {"path": "b.onnx"}}}
    )
    assert config.models == (ModelSource("a", Path("x.onnx")), ModelSource("b", Path("b.onnx")))
    assert config.for_model("a").max_batch_size == 8
    assert config.for_model("b").max_batch_size == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 1}, "port is 1, but it has no effect under Ray Serve: leave it out"),
        ({"client_rate": 1}, "client_rate is 1, but it has no effect under Ray Serve"),
        ({"model-control": "poll"}, "model-control is 'poll', but it has no effect under Ray Serve"),
        ({"models": {"a": {"path": "a.onnx", "client-rate": 5}}}, "client-rate is 5, but it has no effect"),
        ({"models": {"a": 5}}, "models.a in args is 5; it must be a table"),
        ({"prot": 1}, "args has the unknown key 'prot'; did you mean port?"),
        ({"max-batch-size": -1}, "max-batch-size in args is '-1'; it must be an integer"),
    ],
)
def test_an_option_without_effect_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration({"models": ["a.onnx"], **options})
    assert message in str(caught.value)
