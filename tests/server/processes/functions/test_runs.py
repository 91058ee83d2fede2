"""Runs in a child process: what arrives on each side, and errors of the function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.processes.functions.conftest import APP, Start

from tensorferry.server.processes.functions.errors import FunctionRaised, ProcessNotStarted


def command(*text: str) -> dict[str, Any]:
    return {"command": np.array(text, object)}


def arrays() -> dict[str, Any]:
    """Return kinds that the values of test_values.py do not have."""
    values = np.arange(12).reshape(3, 4)
    nested = np.empty(2, object)
    nested[:] = [np.arange(3), np.arange(2.0)]
    return {
        "strings": np.array([["a", "é\0"], ["", "b" * 10_000]], object),
        "structure": np.zeros(2, [("a", "i1"), ("b", "f8")]),
        "strides": values[:, ::2].T,
        "Fortran order": np.asfortranarray(values),
        "broadcast": np.broadcast_to(np.int8(1), (3, 5)),
        "arrays of different lengths": nested,
    }


def assert_equal(got: Any, expected: Any) -> None:
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if expected.dtype.hasobject:
        for one, other in zip(got.flat, expected.flat, strict=True):
            assert type(one) is type(other)
            assert np.array_equal(one, other)
    else:
        assert got.tobytes() == expected.tobytes()


def test_arrays_of_every_kind_arrive_unchanged(started: Start) -> None:
    process = started("echo")
    expected = arrays()
    got = process.run(expected)
    # The memory of the answers is not used for the next run's.
    process.run({name: np.zeros_like(array) for name, array in expected.items()})
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert_equal(got[name], array)


def test_inputs_that_a_function_keeps_do_not_change(started: Start) -> None:
    process = started("previous")
    for number in range(3):
        returned = process.run({"x": np.full(2, number, np.float32)})
    assert returned.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("an object", "an element of the result['y'] is of type tensorferry_app_worker_app.Nonsense, which a child"),
        ("a key", "the result has the key 1; the keys must be names"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_an_error_that_says_so(started: Start, what: str, message: str) -> None:
    process = started()
    with pytest.raises(FunctionRaised) as caught:
        process.run(command(f"return {what}"))
    assert message in caught.value.failure.reason
    assert process.run(command("return nothing")) is None
    assert process.restarts == 0


def test_an_exception_has_the_traceback_of_the_users_code_only(started: Start) -> None:
    process = started()
    with pytest.raises(FunctionRaised, match=r"^ValueError: wrong$") as caught:
        process.run(command("raise wrong"))
    lines = caught.value.failure.details.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f'File "{APP}"' in lines[1]
    assert lines[-1] == "ValueError: wrong"
    assert caught.value.failure.refusal is None


@pytest.mark.parametrize(
    ("act", "reason"), [("sys.exit 3", "SystemExit: 3"), ("untold", "Untold: (its __str__")]
)
def test_other_exceptions_do_not_end_the_process(started: Start, act: str, reason: str) -> None:
    process = started()
    pid = process.run(command("pid")).tolist()
    with pytest.raises(FunctionRaised) as caught:
        process.run(command(act))
    assert caught.value.failure.reason.startswith(reason)
    assert process.run(command("pid")).tolist() == pid


def test_a_memory_error_stays_one_so_that_the_batch_runs_in_parts(started: Start) -> None:
    with pytest.raises(MemoryError, match=r"^too much$"):
        started().run(command("exhaust"))


def test_a_function_may_print(started: Start, capfd: pytest.CaptureFixture[str]) -> None:
    process = started()
    process.run(command("print hello"))
    assert capfd.readouterr().out == "hello\n"


def test_a_class_is_loaded_and_a_step_of_a_pipeline_is_found(started: Start) -> None:
    x = np.ones(2, "f4")
    assert started("loaded").run({"x": x}).tolist() == [3, 3]
    assert started("step").run({"x": x}).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("broken", "model 'broken' cannot be loaded:\nTraceback (most recent call last):\n  File "),
        ("parameters", "has the inputs ['x'], but its function takes ['a', 'b']"),
        ("absent", "declares no function named 'absent'"),
    ],
)
def test_a_start_that_fails_says_why(started: Start, model: str, message: str) -> None:
    process = started(model)
    with pytest.raises(ProcessNotStarted) as caught:
        process.start()
    assert message in caught.value.reason
    assert "Traceback" not in str(caught.value)
    assert process.pid is None


def test_an_app_that_cannot_be_imported(started: Start, tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text("import os\nos._exit(4)\n")
    with pytest.raises(ProcessNotStarted) as caught:
        started("x", app).start()
    assert "its process ended before the function was loaded (exit status 4)" in caught.value.reason
