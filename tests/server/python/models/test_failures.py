"""Failures of functions: text of an InvalidInput is for the client, everything else for the log."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tensorferry.batcher import DeadlineExceeded, InstanceFailed, OutOfMemory
from tensorferry.server.errors import LimitError, NotReadyError
from tensorferry.server.processes.functions.errors import FunctionRaised
from tensorferry.server.python.functions.failure import describe
from tensorferry.server.python.models import failures
from tensorferry.serving import InvalidInput


def raised(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError


def failing() -> None:
    try:
        raise OSError("/secret/path")
    except OSError as error:
        raise ValueError("secret text") from error


def refusing(text: str) -> Callable[[], None]:
    def refuse() -> None:
        raise InvalidInput(text) from OSError("/secret/path")

    return refuse


def test_the_text_of_an_invalid_input_is_bounded_and_never_empty() -> None:
    found = failures.request_error(raised(refusing("a" * 5000)), "embed", "decode")
    assert str(found) == "a" * 1000 + "..."
    found = failures.request_error(raised(refusing("")), "embed", "decode")
    assert str(found) == "step 'decode' of model 'embed' refused the input"
    found = failures.request_error(raised(refusing("\udcff\n")), "embed", "decode")
    assert str(found) == "?\n"


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("late"), OutOfMemory("full"), LimitError("x"), MemoryError()]
)
def test_errors_of_the_server_and_the_batcher_stay(error: BaseException) -> None:
    assert failures.request_error(error, "m", "s") is error


def test_a_failed_instance_of_another_model_is_no_failure_of_this_one() -> None:
    found = failures.request_error(InstanceFailed("the device failed", recover=failing), "m", "s")
    assert (type(found), str(found)) == (
        NotReadyError,
        "step 's' of model 'm' called a model that is not available: the device failed",
    )


def test_an_exception_without_a_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe(Mute()).reason == "Mute: (its __str__ raises an exception)"
    assert describe(KeyError()).reason == "KeyError"


def test_long_texts_are_shortened_and_keep_both_ends() -> None:
    found = describe(ValueError("a" * 100_000))
    assert len(found.reason) < 600
    assert len(found.details) < 17_000
    assert found.details.startswith("ValueError: aaa")
    assert "\n... 84012 characters left out ...\n" in found.details
    assert found.details.endswith("aaa")


def test_a_description_can_come_from_another_process() -> None:
    for function in (failing, refusing("why")):
        found = describe(raised(function))
        assert pickle.loads(pickle.dumps(found)) == found
        here = failures.request_error(raised(function), "m", "s")
        there = failures.request_error(FunctionRaised(found), "m", "s")
        assert (type(there), str(there)) == (type(here), str(here))
