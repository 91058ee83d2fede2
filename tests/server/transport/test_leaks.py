"""The warning about versions and settings of grpcio that leak file descriptors."""

from __future__ import annotations

import pytest

from tensorferry.server.transport.core_leaks import warning_of


@pytest.mark.parametrize(
    ("version", "experiments", "expected"),
    [
        ("1.80.0", "", None),
        ("1.85.1", "another,event_engine_listener", None),
        ("2.0.0rc1", "", None),
        ("1.78.2", "", "install grpcio 1.80 or newer"),
        ("1.85.1", "another,-event_engine_listener", "remove -event_engine_listener from it"),
    ],
)
def test_the_warning_names_cause_and_remedy(version: str, experiments: str, expected: str | None) -> None:
    warning = warning_of(version, experiments, 0.0)
    assert warning is None if expected is None else expected in str(warning)
    # At that age core closes them.
    assert warning_of(version, experiments, 300.0) is None
