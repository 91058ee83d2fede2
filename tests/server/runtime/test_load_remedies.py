"""Errors for files that cannot be loaded name the format and the remedy."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from support.models import custom_operator, small
from support.models.small import written

from tensorferry.server.errors import StartError
from tensorferry.server.runtime.files.load_remedies import remedy_for
from tensorferry.server.runtime.files.op_libraries import OpLibrary
from tensorferry.server.runtime.session import Session

ROOT = Path(__file__).resolve().parents[3]


def archive(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as made:
        for name in names:
            made.writestr(name, b"\x80\x02}.")
    return data.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
# What torch.save wrote before 1.6.
OLD_TORCH = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
SAFETENSORS = struct.pack("<Q", 2) + b'{"__metadata__": {}}'


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (LFS, "It is a Git LFS pointer, not the model: fetch the model with git lfs pull"),
        (archive("model/data.pkl", "model/version"), "It is a PyTorch file, not ONNX: export it with torch.onnx.export"),
        (OLD_TORCH, "It is a PyTorch file, not ONNX"),
        (pickle.dumps({"a": 1}), "It is a Python pickle, not ONNX"),
        (archive("model.onnx"), "It is a zip archive: unpack it"),
        (gzip.compress(b"model"), "It is compressed with gzip: unpack it with gunzip"),
        (b"<!DOCTYPE html><html>", "It is a web page or XML, not ONNX"),
        (b"\x89HDF\r\n\x1a\n", "It is an HDF5 file (Keras), not ONNX: convert it with tf2onnx"),
        (b"\x1c\x00\x00\x00TFL3", "It is a TensorFlow Lite file, not ONNX: convert it with tf2onnx"),
        (SAFETENSORS, "It is a safetensors file, which has weights alone"),
        (archive("é").replace("é".encode(), b"\xff\xfe"), "It is not ONNX"),
        (b"", "It is empty"),
    ],
    # Archives hold the time at which they were made, which differs between pytest's processes.
    ids=["lfs", "torch", "old torch", "pickle", "zip", "gzip", "html", "hdf5", "tflite", "safetensors", "broken zip", "empty"],
)  # fmt: skip
def test_other_formats_are_named_with_the_remedy(tmp_path: Path, content: bytes, remedy: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(StartError) as caught:
        Session(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ONNX Runtime cannot load it: ")
    assert f". {remedy}" in message
    assert ".." not in message.replace(str(tmp_path), "")


def too_new(model: onnx.ModelProto) -> None:
    model.ir_version = 99


def too_new_an_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 99


def without_its_weights(model: onnx.ModelProto) -> None:
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], "weights.bin")
    model.graph.initializer[0].ClearField("raw_data")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (too_new, "The file is newer than this onnxruntime: upgrade onnxruntime"),
        (too_new_an_opset, "The file is newer than this onnxruntime: upgrade onnxruntime"),
        (without_its_weights, r"The model's weights are in a file of their own: copy \S+weights.bin from"),
    ],
)
def test_a_file_that_this_machine_cannot_load_is_answered_with_the_remedy(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None], remedy: str
) -> None:
    path = small.mlp(tmp_path / "m.onnx")
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)
    with pytest.raises(StartError, match=remedy):
        Session(path)


@pytest.mark.parametrize(
    ("domain", "remedy"),
    [
        ("ai.onnx.contrib", ". Operators of ai.onnx.contrib are in the package onnxruntime-extensions: pip install onnxruntime-extensions, and give --custom-ops onnxruntime-extensions"),
        ("com.microsoft.extensions", ". Operators of com.microsoft.extensions are in the package onnxruntime-extensions"),
        ("com.microsoft", "$"),
        ("com.acme", ". Operators of com.acme are in a library of custom operators: name its file by --custom-ops, or as op_library_filename"),
    ],
)  # fmt: skip
def test_an_unknown_domain_is_named_with_the_option(tmp_path: Path, domain: str, remedy: str) -> None:
    path = custom_operator.model(tmp_path / "m.onnx", "Foo", domain)
    with pytest.raises(StartError, match=f"{domain}:Foo.* is not a registered function/op{remedy}"):
        Session(path)


def test_libraries_without_the_operator_are_named(tmp_path: Path) -> None:
    reason = "Fatal error: ai.onnx.contrib:Foo(-1) is not a registered function/op"
    libraries = (OpLibrary(Path("/a.so"), "x"), OpLibrary(Path("/b.so"), "x", own_domains=True))
    assert remedy_for(tmp_path, reason, libraries) == (
        ". It is not among the custom operators of /a.so, /b.so. Operators of ai.onnx.contrib are in the package "
        "onnxruntime-extensions: pip install onnxruntime-extensions, and upgrade that package"
    )


LOADS = "import sys; from pathlib import Path; from tensorferry.server.runtime.session import Session; Session(Path(sys.argv[1]))"


def load(path: Path, locales: Path) -> subprocess.CompletedProcess[str]:
    """Load a model in a process that has only these locales."""
    return subprocess.run(
        [sys.executable, "-c", LOADS, str(path)],
        env={**os.environ, "LOCPATH": str(locales), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_missing_locale_is_named_with_the_remedy_and_the_image_has_it(tmp_path: Path) -> None:
    text = """(string[n] x) => (string[n] y) { y = StringNormalizer <case_change_action = "LOWER"> (x) }"""
    path = written(tmp_path / "m.onnx", text)
    failed = load(path, tmp_path)
    assert failed.returncode == 1
    assert (
        "The machine lacks the locale en_US.UTF-8: apt-get install locales && localedef -i en_US "
        in failed.stderr
    )
    # ONNX Runtime's own line would repeat the message.
    assert "[E:onnxruntime" not in failed.stderr
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    made = re.search(r"localedef -i en_US -f UTF-8 (/usr/lib/locale/en_US\.UTF-8)", dockerfile)
    assert made is not None
    assert f"COPY --from=locale {made[1]} {made[1]}\n" in dockerfile
