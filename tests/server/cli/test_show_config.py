"""`tensorferry config` prints the configuration that a server would use, or what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import small

from tensorferry.server.cli import show_config
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.onnx.inspection.model_argument import source_in


def repository(root: Path, text: str | None, *versions: str, file: str = "model.onnx") -> Path:
    home = root / "m"
    for version in versions:
        (home / version).mkdir(parents=True)
        small.twice(home / version / file)
    if text is not None:
        (home / "config.pbtxt").write_text(text)
    return home


def test_the_table_of_the_model_applies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = repository(tmp_path, "max_batch_size: 6", "1")
    path = small.twice(tmp_path / "a.onnx")
    file = tmp_path / "c.toml"
    file.write_text(
        f"port = 0\nmax-batch-size = 3\n[models.a]\npath = '{path}'\nmax-batch-size = 4\ninstances = 2\n"
        "[models.m]\nmax-batch-size = 4\nthreads = 1"
    )

    def printed(model: str | Path, *flags: str) -> tuple[int, int, dict[str, str]]:
        assert show_config.main([str(model), "--device", "cpu", *flags]) == 0
        config = parse_config(capsys.readouterr().out, "")
        parameters = {name: value.string_value for name, value in config.parameters.items()}
        return config.max_batch_size, config.instance_group[0].count, parameters

    assert printed("a", "--config", str(file)) == (4, 2, {})
    assert printed(path, "--config", str(file), "--max-batch-size", "5") == (4, 2, {})
    assert printed(f"b={path}", "--config", str(file)) == (3, 1, {})
    assert printed(home, "--config", str(file)) == (6, 1, {"intra_op_thread_count": "1"})
    monkeypatch.setenv("TENSORFERRY_CONFIG", str(file))
    assert printed("a") == (4, 2, {})
    monkeypatch.delenv("TENSORFERRY_CONFIG")
    assert printed(path, "--instances", "3", "--threads", "2") == (32, 3, {"intra_op_thread_count": "2"})


def test_states_of_the_table_are_no_tensors_of_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"[models.a]\npath = '{small.keeping(tmp_path / 'a.onnx')}'\nstate = 'past=next'")
    assert show_config.main(["a", "--device", "cpu", "--config", str(file)]) == 0
    config = parse_config(capsys.readouterr().out, "")
    tensors = [[tensor.name for tensor in each] for each in (config.input, config.output)]
    assert tensors == [["x"], ["y"]]
    assert config.sequence_batching.state[0].input_name == "past"


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["absent.onnx"], 1, "absent.onnx: no such file"),
        (["absent.onnx", "--max-batch-size", "-1"], 2, "--max-batch-size is '-1'; it must be an integer"),
        (["m.onnx", "--config", "absent.toml"], 2, "--config is 'absent.toml'; it must be a readable TOML file"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_config.main(argv) == code
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("tensorferry config: ")
    assert said in streams.err
    assert len(streams.err.splitlines()) == 1


def test_a_wrong_log_level_names_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORFERRY_LOG_LEVEL", "loud")
    assert show_config.main(["m.onnx"]) == 2
    assert "config: TENSORFERRY_LOG_LEVEL is 'loud'; it must be" in capsys.readouterr().err


def test_a_directory_whose_name_is_no_model_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".m").mkdir()
    with pytest.raises(StartError, match=r"is named '\.m', which is not a valid model name: rename it"):
        source_in(tmp_path / ".m")


def test_an_ensemble_is_printed_with_its_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        platform: "ensemble" max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 }
        ensemble_scheduling {
          step { model_name: "a" model_version: -1 input_map { key: "u" value: "x" } output_map { key: "v" value: "y" } }
        }"""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    assert show_config.main([str(tmp_path / "m")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# an ensemble of a, with whose configurations a server compares it\n")
    expected = parse_config(text + 'name: "m" version_policy { latest { num_versions: 1 } }', "")
    assert parse_config(printed, "") == expected
    (tmp_path / "m" / "config.pbtxt").write_text(text.replace('value: "y"', 'value: "z"'))
    assert show_config.main([str(tmp_path / "m")]) == 1
    assert "ensemble output 'y' for ensemble 'm' is not used" in capsys.readouterr().err


def test_every_model_of_a_python_file_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a=b").mkdir()
    (tmp_path / "a=b" / "app.py").write_text(
        "from tensorferry.serving import FP32, model, pipeline\n"
        "@model(inputs={'x': FP32[-1]}, outputs={'y': FP32[-1]})\n"
        "def one(x):\n    return x\n"
        "two = pipeline('two', 'one')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert show_config.main(["./a=b/app.py"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith('# batches of up to 32 rows (tested)\nname: "one"\nplatform: "python"')
    assert second.startswith('# one: its own batches\nname: "two"\nplatform: "ensemble"')


def test_each_model_of_a_repository_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that cannot be served are errors."""
    repository(tmp_path, None, "1")
    for name in ("a", "z"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.onnx").write_text("no model")
    assert show_config.main([str(tmp_path), "--max-batch-size", "5"]) == 1
    out, err = capsys.readouterr()
    assert ('name: "m"' in out, "max_batch_size: 5" in out) == (True, True)
    assert [line.split("/1/")[0].rpartition("/")[2] for line in err.splitlines()] == ["a", "z"]
    for name in ("a", "z"):
        small.twice(tmp_path / name / "1" / "model.onnx")
    assert show_config.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("max_batch_size: 32") == 3
