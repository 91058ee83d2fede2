"""Import of app files: what they declare, and errors as Python prints them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorferry.server.errors import StartError
from tensorferry.server.python.functions.app_file import find_function, import_alone, import_app
from tensorferry.serving import FunctionModel

DECLARE = "from tensorferry.serving import *\n@model(inputs={'x': FP32[-1]}, outputs={'y': FP32[-1]}%s)\ndef %s(x): return x\n"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Take back what imports of app files change in the interpreter."""
    path, modules = sys.path[:], set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return tmp_path / "app.py"


def test_public_models_are_declared(app: Path) -> None:
    app.write_text(
        DECLARE % ("", "one")
        + DECLARE % (", name='second'", "two")
        + DECLARE % (", name='hidden'", "_hidden")
        + "three = onnx('m.onnx')\n_four = onnx('n.onnx')\nfive = pipeline('five', one, _hidden, three)\nsame = one\n"
    )
    declared = import_app(app)
    assert list(declared) == ["one", "second", "m", "five"]
    assert find_function(declared, "one", app) is declared["one"]
    hidden = find_function(declared, "hidden", app)
    assert isinstance(hidden, FunctionModel)
    with pytest.raises(StartError, match="declares no function named 'm' when a child process imports it"):
        find_function(declared, "m", app)


def test_neighbours_can_be_imported_and_a_changed_file_is_run_again(app: Path) -> None:
    (app.parent / "neighbour_of_app.py").write_text(DECLARE % ("", "one"))
    app.write_text("from neighbour_of_app import one\n")
    assert list(import_app(app)) == ["one"]
    app.write_text("from neighbour_of_app import one as two\n" + DECLARE % ("", "new"))
    assert list(import_app(app)) == ["one", "new"]
    assert sys.path.count(str(app.parent)) == 1
    assert not (app.parent / "__pycache__" / "app.cpython-311.pyc").exists()


def test_files_of_the_same_name_are_different_modules(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "b", "a"):
        path = tmp_path / folder / "app.v1.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            "import sys\nassert sys.modules[__name__].__file__ == __file__\n" + DECLARE % ("", "one")
        )
        one = import_app(path)["one"]
        assert isinstance(one, FunctionModel)
        names.append(one.function.__module__)
    assert names == ["tensorferry_app_app_v1", "tensorferry_app_app_v1_2", "tensorferry_app_app_v1"]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("def one(:\n", "SyntaxError: invalid syntax"),
        ("import absent_module\n", "ModuleNotFoundError: No module named 'absent_module'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
    ],
)
def test_every_failure_is_an_error_with_the_file(app: Path, text: str, end: str) -> None:
    app.write_text(text)
    with pytest.raises(StartError) as caught:
        import_app(app)
    assert f'File "{app}", line 1' in str(caught.value)
    assert str(caught.value).endswith(end)
    assert "importlib" not in str(caught.value)
    assert "app_file.py" not in str(caught.value)
    assert all(getattr(module, "__file__", None) != str(app) for module in list(sys.modules.values()))


def test_an_absent_file_is_named(app: Path) -> None:
    with pytest.raises(StartError, match=r"app\.py: No such file or directory$"):
        import_app(app)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "declares no model; decorate a function with @model"),
        (DECLARE % ("", "one") + DECLARE % (", name='one'", "two"), "declares two models named 'one'"),
    ],
)
def test_an_app_without_models_or_with_equal_names_is_refused(app: Path, text: str, message: str) -> None:
    app.write_text(text)
    with pytest.raises(StartError, match=message):
        import_app(app)


def test_two_steps_of_one_name_cannot_be_told_apart(app: Path) -> None:
    steps = "".join(DECLARE % (", name='step'", f"_{number}") for number in range(2))
    app.write_text(f"{steps}one = pipeline('one', _0)\ntwo = pipeline('two', _1)\n")
    with pytest.raises(StartError, match="declares 2 functions named 'step'"):
        find_function(import_app(app), "step", app)


def test_neighbours_are_imported_from_their_source(tmp_path: Path) -> None:
    """Bytecode of a source with the same time and size would be used in place of a changed one."""
    path, package = tmp_path / "alone.py", tmp_path / "parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    path.write_text(
        "from parts.size import SIZE\nfrom tensorferry.serving import FP32, model\n"
        '@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, max_batch_size=SIZE)\ndef alone(x): return x\n'
    )
    for size in (3, 4):
        (package / "size.py").write_text(f"SIZE = {size}")
        os.utime(package / "size.py", (1, 1))
        declared = import_alone(path)["alone"]
        assert isinstance(declared, FunctionModel)
        assert declared.max_batch_size == size
    assert not list(tmp_path.rglob("__pycache__"))
    assert "parts" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_a_pipeline_that_is_bound_to_no_name_is_warned_of(
    app: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app.write_text(DECLARE % ("", "one") + "pipeline('lost', one)\n_kept = pipeline('kept', one)\n")
    import_app(app)
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith(f"{app}: pipeline 'lost' is bound to no name of the module")


def test_a_wrong_declaration_is_told_with_its_line_and_without_a_traceback(app: Path) -> None:
    app.write_text("\n" + (DECLARE % ("", "one")).replace("def", "async def"))
    with pytest.raises(StartError) as caught:
        import_app(app)
    assert str(caught.value).startswith(f"{app}:3: model 'one' is an `async def`")
    assert "Traceback" not in str(caught.value)
