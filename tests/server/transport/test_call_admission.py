"""Admission of calls, the same on both transports."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
from support.server.rig import PATIENCE
from support.server.scripted_service import shared_state

from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.transport.call_admission import CallAdmission, deadline_after


def admission() -> CallAdmission[None]:
    service = InferenceService(ModelRegistry())
    return CallAdmission(service, shared_state(), peer_of=_not_read, certificate_of=_not_read)


def _not_read(call: None) -> Any:
    raise AssertionError("clients are not identified")


@pytest.mark.parametrize("remaining", [None, 9e18])
def test_a_call_without_a_deadline_has_an_infinite_one(remaining: float | None) -> None:
    assert deadline_after(remaining) == math.inf
    assert admission().admit_unary(None, (), remaining) == (ANONYMOUS, math.inf)


@pytest.mark.parametrize("remaining", [-1.0, 5.0])
def test_a_deadline_is_on_the_monotonic_clock(remaining: float) -> None:
    before = time.monotonic()
    found = deadline_after(remaining)
    caller, deadline = admission().admit_unary(None, (), remaining)
    assert caller is ANONYMOUS
    assert before + remaining <= found <= deadline <= time.monotonic() + remaining


def test_the_wait_for_open_calls_ends_with_the_last() -> None:
    calls = admission()
    assert calls.calls.wait_until_none(0)
    calls.admit_unary(None, (), None)
    calls.calls.begin_stream()
    calls.calls.end_unary()
    assert not calls.calls.wait_until_none(0)
    calls.admit_unary(None, (), None)
    calls.calls.end_stream()
    assert not calls.calls.wait_until_none(0)
    waiting = threading.Thread(target=calls.calls.wait_until_none, args=(PATIENCE,))
    waiting.start()
    calls.calls.end_unary()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert calls.calls.wait_until_none(0)
