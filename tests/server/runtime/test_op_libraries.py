"""Libraries of custom operators: where they are named, what is wrong with them, and sessions that register them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.models import custom_operator, extensions

from tensorferry.protos.model_config_pb2 import ModelConfig, ModelOperations
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import StartError
from tensorferry.server.runtime.files.op_libraries import libraries_for, replacing_library, server_libraries
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session

EXTENSIONS = "onnxruntime-extensions"


def configured(*names: str) -> ModelConfig:
    return ModelConfig(model_operations=ModelOperations(op_library_filename=names))


def in_repository(root: Path) -> ModelSource:
    return ModelSource("m", root / "m" / "2" / "model.onnx", "2", directory=root / "m")


def test_the_package_is_named_without_a_file(tmp_path: Path) -> None:
    extensions.skip_without()
    libraries = server_libraries((EXTENSIONS,))
    assert libraries == server_libraries(("onnxruntime_extensions", EXTENSIONS))
    assert replacing_library(libraries) is None
    path = extensions.tokenizer(tmp_path / "m.onnx", 4)
    session = Session(path, settings=OrtOptions(op_libraries=libraries))
    assert [spec.name for spec in session.signature.outputs] == ["ids", "mask"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.so", "--custom-ops names 'nowhere.so', but there is no such file; give the path of a shared library"),
        ("x" * 300, "--custom-ops names 'x*', which cannot be read: .*File name too long"),
        (".", "--custom-ops names '.', which is not a file; give the path of a shared library"),
        (__file__, "which ONNX Runtime cannot load: .*invalid ELF header; it must be a shared library for this machine"),
    ],
)  # fmt: skip
def test_an_unusable_library_is_named_with_the_reason(given: str, message: str) -> None:
    with pytest.raises(StartError, match=message):
        server_libraries((given,))


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_extensions", None)
    expected = (
        f"--custom-ops names '{EXTENSIONS}', but that package is not installed: pip install {EXTENSIONS}$"
    )
    with pytest.raises(StartError, match=expected):
        server_libraries.__wrapped__((EXTENSIONS,))


@pytest.mark.parametrize("before", [{}, {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "upb"}])
def test_the_import_of_the_package_leaves_the_environment(
    before: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
    monkeypatch.delenv(name, raising=False)
    for variable, text in before.items():
        monkeypatch.setenv(variable, text)
    library = custom_operator.library(tmp_path / "ops.so")
    (tmp_path / "onnxruntime_extensions.py").write_text(
        f"import os\nos.environ[{name!r}] = 'python'\ndef get_library_path(): return {str(library)!r}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime_extensions", raising=False)
    assert server_libraries.__wrapped__((EXTENSIONS,))[0].path == library
    monkeypatch.delitem(sys.modules, "onnxruntime_extensions")
    assert os.environ.get(name) == before.get(name)


def test_a_library_is_registered_once(tmp_path: Path) -> None:
    path = custom_operator.library(tmp_path / "m" / "twice.so")
    link = tmp_path / "link.so"
    link.symlink_to(path)
    source = in_repository(tmp_path)
    (library,) = libraries_for(configured("twice.so", str(path)), source, (str(link), str(path)))
    assert library.path.resolve() == path


def test_two_libraries_with_one_domain_are_named(tmp_path: Path) -> None:
    first, second = (custom_operator.library(tmp_path / "m" / name) for name in ("a.so", "b.so"))
    message = (
        f"--custom-ops names '{first}'; --custom-ops names '{second}': ONNX Runtime refuses the operators: "
    )
    with pytest.raises(StartError) as caught:
        server_libraries((str(first), str(second)))
    assert str(caught.value).startswith(message)
    assert "ONNXRuntimeError" not in str(caught.value)
    with pytest.raises(StartError, match=r"model 'm' has op_library_filename 'b.so': ONNX Runtime refuses"):
        libraries_for(configured("b.so"), in_repository(tmp_path), (str(first),))


def test_a_configuration_names_files_of_its_version_then_of_its_model(tmp_path: Path) -> None:
    source = in_repository(tmp_path)
    of_model = custom_operator.library(tmp_path / "m" / "twice.so")
    elsewhere = custom_operator.library(tmp_path / "half.so", domain="com.other")
    assert [each.path for each in libraries_for(configured("twice.so"), source, ())] == [of_model]
    of_version = custom_operator.library(tmp_path / "m" / "2" / "twice.so")
    found = libraries_for(configured("twice.so", str(elsewhere)), source, ())
    assert [each.path for each in found] == [of_version, elsewhere]
    with pytest.raises(StartError) as caught:
        libraries_for(configured("third.so"), source, ())
    assert str(caught.value) == (
        "the configuration of model 'm' has op_library_filename 'third.so', but it is not in "
        f"{tmp_path}/m/2 or {tmp_path}/m; put the library there, or give its absolute path"
    )
    with pytest.raises(StartError, match=r"'/third.so', but there is no such file; "):
        libraries_for(configured("/third.so"), source, ())
