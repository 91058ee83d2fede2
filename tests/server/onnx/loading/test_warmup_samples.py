"""Warm-up samples of a configuration have the described inputs, and must fit the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.server.rig import signature, spec

from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.onnx.loading.warmup_samples import WarmupSample, warmup_samples
from tensorferry.server.signature import Signature

BATCHED = signature(spec("x", "FP32", "batch", 2), spec("s", "BYTES", "batch", "n"))
ALONE = signature(spec("x", "FP32", 1, 2))

S = 'inputs { key: "s" value { data_type: TYPE_STRING dims: 3 zero_data: true } }'


def x(kind: str, dims: str = "2", datatype: str = "TYPE_FP32") -> str:
    return f'inputs {{ key: "x" value {{ data_type: {datatype} dims: [ {dims} ] {kind} }} }}'


def samples(
    text: str, model: Signature = BATCHED, most: int = 8, directory: Path | None = None
) -> list[WarmupSample]:
    config = parse_config(text, "test")
    config.name, config.max_batch_size = "m", most
    return warmup_samples(config, model, directory)


def test_zero_data_has_zeros_and_empty_strings() -> None:
    (sample,) = samples(f'model_warmup {{ name: "w" batch_size: 4 count: 2 {x("zero_data: true")} {S} }}')
    assert (sample.name, sample.count) == ("w", 2)
    assert sample.inputs["x"].dtype == np.float32
    assert sample.inputs["x"].tolist() == [[0.0, 0.0]] * 4
    assert sample.inputs["s"].tolist() == [["", "", ""]] * 4
    # The kind of data counts, whatever its value.
    (sample,) = samples(f"model_warmup {{ batch_size: 1 {x('zero_data: false')} {S} }}")
    assert (sample.name, sample.count) == ("number 1", 1)


def test_samples_of_a_binary_input_are_bytes(tmp_path: Path) -> None:
    model = signature(spec("s", "BYTES", "batch", "n", binary=True))
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "f").write_bytes(b"\1\0\0\0\xff" * 3)
    for kind, element in (
        ("zero_data: true", b""),
        ("random_data: true", b""),
        ('input_data_file: "f"', b"\xff"),
    ):
        text = S.replace("zero_data: true", kind)
        (sample,) = samples(f"model_warmup {{ batch_size: 2 {text} }}", model, directory=tmp_path)
        assert sample.inputs["s"].tolist() == [[element] * 3] * 2


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "INT64", "BOOL"])
def test_random_data_has_the_datatype_and_equal_rows(datatype: str) -> None:
    model = signature(spec("x", datatype, "batch", 50))
    text = f"model_warmup {{ batch_size: 2 {x('random_data: true', '50', 'TYPE_' + datatype)} }}"
    (sample,) = samples(text, model)
    array = sample.inputs["x"]
    assert (array.dtype, array.shape) == (model.inputs[0].datatype.storage, (2, 50))
    assert array[0].tolist() == array[1].tolist()
    assert len(set(array[0].tolist())) > 1


def test_without_a_batch_axis_dims_are_complete() -> None:
    (sample,) = samples(f"model_warmup {{ batch_size: 1 {x('zero_data: true', '1, 2')} }}", ALONE, 0)
    assert sample.inputs["x"].shape == (1, 2)


def test_a_sample_without_rows_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert samples('model_warmup { name: "none" }') == []
    assert caplog.messages == [
        "the warm-up sample 'none' of model 'm' has batch_size 0 and is left out, as in Triton: set it to at least 1"
    ]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    home = tmp_path / "m"
    (home / "warmup").mkdir(parents=True)
    (home / "warmup" / "x").write_bytes(np.array([1.5, -2.5, 9.0], np.float32).tobytes())
    (home / "warmup" / "short").write_bytes(bytes(7))
    (home / "warmup" / "s").write_bytes(b"\x01\0\0\0a\x02\0\0\0\xc3\xa9\0\0\0\0")
    (home / "warmup" / "wrong").write_bytes(b"\x02\0\0\0a")
    (home / "warmup" / "latin").write_bytes(b"\x01\0\0\0\xe9" * 3)
    (home / "config.pbtxt").write_text("")
    (tmp_path / "outside").write_bytes(bytes(100))
    (home / "warmup" / "link").symlink_to(tmp_path / "outside")
    return home


def file(name: str) -> str:
    return f'input_data_file: "{name}"'


def test_a_file_has_one_row_which_is_repeated(directory: Path) -> None:
    s = S.replace("zero_data: true", file("s"))
    text = f"model_warmup {{ batch_size: 3 {x(file('x'))} {s} }}"
    (sample,) = samples(text, directory=directory)
    assert sample.inputs["x"].tolist() == [[1.5, -2.5]] * 3
    assert sample.inputs["s"].tolist() == [["a", "é", ""]] * 3


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (S, r"it has the inputs \['s'\]; the model has \['s', 'x'\]"),
        (x("zero_data: true", datatype="TYPE_FP16") + S, "'x' has data_type TYPE_FP16; the model takes TYPE_FP32"),
        (x("zero_data: true", "-1") + S, r"expects all variable-size dimensions are specified for input 'x', got \[-1"),
        (x("zero_data: true", "3") + S, r"'x' has dims \[3\]; the model takes \[2\] \(without the batch axis\)"),
        (x("zero_data: true") + S.replace("dims: 3", "dims: 0"), r"'s' has dims \[0\]; dynamic axes must have at least one element"),
        (x("") + S, "expects input 'x' to have input_data_type set"),
        (x(file("short")) + S, "warmup setting expects 8 bytes, but the data provided from short only has 7 bytes"),
        (x(file("absent")) + S, "from the file 'absent', which cannot be read"),
        (x(file("../config.pbtxt")) + S, r"'\.\./config\.pbtxt', which is not in"),
        (x(file("/etc/hostname")) + S, "'/etc/hostname', which is not in"),
        (x(file("link")) + S, "'link', which is not in"),
        (x(file("a\\000b")) + S, "which is no file name"),
        (x("zero_data: true") + S.replace("zero_data: true", file("wrong")), "from the file 'wrong': "),
        (x("zero_data: true") + S.replace("zero_data: true", file("latin")), "from the file 'latin': "),
    ],
)  # fmt: skip
def test_a_sample_that_does_not_fit_is_named(inputs: str, message: str, directory: Path) -> None:
    text = f'model_warmup {{ name: "w" batch_size: 1 {inputs} }}'
    with pytest.raises(ModelConfigError, match=message) as caught:
        samples(text, directory=directory)
    assert str(caught.value).startswith("model_warmup 'w' of model 'm': ")
    if "input_data_file" in text:
        with pytest.raises(ModelConfigError, match="but the model has no directory with such files"):
            samples(text)


def test_a_sample_has_at_most_the_rows_of_a_batch() -> None:
    text = f"model_warmup {{ batch_size: 9 {x('zero_data: true')} {S} }}"
    with pytest.raises(ModelConfigError, match="batch_size is 9; it must be at most 8"):
        samples(text)
    with pytest.raises(
        ModelConfigError, match="batch_size is 9; it must be at most 1, because max_batch_size is 0"
    ):
        samples(text, ALONE, 0)


def test_runs_are_bounded_over_all_samples() -> None:
    one = f"batch_size: 1 {x('zero_data: true')} {S}"
    text = f"model_warmup {{ count: 600 {one} }} model_warmup {{ count: 401 {one} }}"
    with pytest.raises(ModelConfigError, match=r"asks for 1001 runs; the limit is 1000 .*lower 'count'"):
        samples(text)
    with pytest.raises(ModelConfigError, match="asks for 2147483647 runs"):
        samples(f"model_warmup {{ count: 2147483647 {one} }}")


def test_a_sample_larger_than_the_memory_is_refused_before_it_is_allocated() -> None:
    text = f"model_warmup {{ batch_size: 8 {x('zero_data: true')} {S.replace('dims: 3', 'dims: 4611686018427387904')} }}"
    with pytest.raises(
        ModelConfigError, match=r"input 's' with dims .* GiB of memory are available; lower them"
    ):
        samples(text)
