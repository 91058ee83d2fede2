"""The operator is told of a grpcio, or a setting of it, that leaks files."""

from __future__ import annotations

import pytest

from tensorferry.server.transport.core_leaks import leaks_files, warning_of


@pytest.mark.parametrize(
    ("version", "experiments", "words"),
    [
        ("1.80.0", "", None),
        ("1.85.1", "another,event_engine_listener", None),
        ("2.0.0rc1", "", None),
        ("1.78.2", "", "install grpcio 1.80 or newer"),
        ("1.85.1", "another,-event_engine_listener", "remove -event_engine_listener from it"),
    ],
)
def test_leaks_are_warned_of(version: str, experiments: str, words: str | None) -> None:
    warning = warning_of(version, experiments)
    assert leaks_files(version, experiments) is (words is not None)
    assert warning is None if words is None else words in str(warning)
