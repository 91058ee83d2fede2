"""Tables of single models in the file: their keys, errors, checks and precedence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tensorferry.server.config.load import load_config
from tensorferry.server.config.model_tables import unserved_tables
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import ConfigError

Write = Callable[..., ServerConfig]


@pytest.fixture
def load(tmp_path: Path) -> Write:
    """Load the configuration in a text, with models and flags of a command line if given."""

    def loaded(text: str, *models: str, **flags: str) -> ServerConfig:
        file = tmp_path / "c.toml"
        file.write_text(text)
        return load_config(models, {name.replace("_", "-"): text for name, text in flags.items()}, {}, file)

    return loaded


def test_a_table_holds_for_its_model_only(load: Write) -> None:
    config = load("max-batch-size = 16\n[models.m]\nmax_batch_size = 8\nslo-ms = 25", "m.onnx", "n.onnx")
    assert config.max_batch_size == 16
    of_m = config.for_model("m")
    assert (of_m.max_batch_size, of_m.slo) == (8, 0.025)
    assert config.for_model("n") == config
    assert of_m.for_model("m") == of_m


def test_a_table_precedes_flags(load: Write) -> None:
    config = load("[models.m]\nmax-batch-size = 8", "m.onnx", max_batch_size="2", slo_ms="5")
    assert config.max_batch_size == 2
    assert (config.for_model("m").max_batch_size, config.for_model("m").slo) == (8, 0.005)


def test_a_table_with_a_path_names_a_model_to_serve(load: Write) -> None:
    text = '[models.m]\npath = "dir/a.onnx"\n[models.n]\nslo-ms = 5\n[models."o.p"]\npath = "o.onnx"'
    config = load(text)
    assert config.models == (ModelSource("m", Path("dir/a.onnx")), ModelSource("o.p", Path("o.onnx")))
    assert list(config.model_options) == ["m", "n", "o.p"]


def test_models_of_the_command_line_replace_the_paths_of_tables_but_not_their_options(load: Write) -> None:
    config = load('[models.m]\npath = "a.onnx"\nslo-ms = 5\n[models.n]\npath = "n.onnx"', "m=b.onnx")
    assert config.models == (ModelSource("m", Path("b.onnx")),)
    assert config.for_model("m").slo == 0.005


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.m]\nmax-batch-size = -1", "max-batch-size in [models.m] of FILE is '-1'; it must be an"),
        ("[models.m]\nslo-ms = 1\nslo_ms = 2", "[models.m] of FILE has both slo-ms and slo_ms"),
        ("[models.m]\nmax_bach_size = 1", "has the unknown key 'max_bach_size'; did you mean max-batch-size?"),
        (
            "[models.m]\nport = 1",
            "[models.m] of FILE has 'port', which is an option of the whole server, not of one model: give it above all "
            "tables; it can have path",
        ),
        ('[models.m]\npath = "a\\u0000"', "path in [models.m] of FILE is 'a\\x00'; it must be the path or address"),
        ("[models.m]\npath = 3", "path in [models.m] of FILE is 3; it must be the path or address of a model"),
        ("[models]\nm = 'a.onnx'", "models.m in FILE is 'a.onnx'; it must be a table of the model's options: "),
        ("[models.m.n]\nslo-ms = 1", "[models.m] of FILE has the table 'n'; a name with dots needs quotes: [models.\"m.n\"]"),
        ("[models.'a b']\nslo-ms = 1", 'FILE has the table [models."a b"], whose name is not allowed: a name'),
    ],
)  # fmt: skip
def test_an_error_names_the_table_and_what_to_change(
    text: str, message: str, load: Write, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, "m.onnx")
    assert message in str(caught.value).replace(str(tmp_path / "c.toml"), "FILE")


def test_a_file_without_a_path_in_its_tables_names_no_model(load: Write) -> None:
    with pytest.raises(ConfigError, match=r"no MODEL was given; .* or path in \[models\.m\]$"):
        load("[models.m]\nslo-ms = 1\n[models.n]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.m]\npad-values = 'x=0'", "pad-values are given without pad-lengths"),
        (
            "priority-weights = [4, 2, 1]\ndefault-priority = 3\n[models.m]\npriority-weights = [2, 1]",
            "default-priority is 3, but priority-weights has 2 classes",
        ),
        ("[models.m]\ndevice = 'cpu'\ntf32 = false", "tf32 is false, which has no effect because device is cpu"),
        ("device = 'cpu'\n[models.m]\ntf32 = false", "tf32 is false, which has no effect because device is cpu"),
    ],
)  # fmt: skip
def test_a_contradiction_in_a_table_is_an_error(text: str, message: str, load: Write) -> None:
    with pytest.raises(ConfigError, match=r"^\[models\.m\]: ") as caught:
        load(text, "m.onnx")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        # Options of the server that only some models use.
        "pad-values = 'x=0'\n[models.m]\npad-lengths = 'n=8'",
        "pad-lengths = 'n=8'\npad-values = 'x=0'\n[models.m]\nmax-batch-size = 0",
        "preferred-batch-sizes = [16]\n[models.m]\nmax-batch-size = 8",
        "device = 'cpu'\ntf32 = false\n[models.m]\ndevice = 'cuda'",
        # Options of a table that complete those of the server.
        "pad-lengths = 'n=8'\n[models.m]\npad-values = 'x=0'",
        "device = 'cpu'\n[models.m]\ndevice = 'cuda'\ntf32 = false",
    ],
)
def test_options_of_the_server_and_of_a_table_complete_each_other(text: str, load: Write) -> None:
    assert load(text, "m.onnx").model_options["m"]


def test_the_values_of_an_option_are_those_of_the_server_and_of_the_tables(load: Write) -> None:
    config = load("max-queue-delay-ms = 2\n[models.m]\nmax-queue-delay-ms = 5\nslo-ms = 7", "m.onnx")
    assert config.values("max_queue_delay") == [0.002, 0.005]


def test_a_table_of_a_model_that_is_not_served_causes_a_warning(load: Write) -> None:
    config = load("[models.m]\n[models.digit]\n[models.'x.y']", "m.onnx")
    assert unserved_tables(config, ["digits", "m"]) == [
        "[models.digit] has no effect: no model of that name is served; did you mean [models.digits]?",
        '[models."x.y"] has no effect: no model of that name is served',
    ]
