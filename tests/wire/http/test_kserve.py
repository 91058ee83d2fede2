"""KServe's client of HTTP, unchanged and in its own environment, against a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.processes import models
from support.processes.server import running
from support.wire.programs import CLIENTS, needs, report_of
from wire.test_kserve import PYTHON, TENSORS

CLIENT = Path(__file__).resolve().parents[2] / "support" / "wire" / "kserve_rest_client.py"
pytestmark = needs(CLIENTS / "kserve" / ".done")


@pytest.fixture(scope="module")
def report(transport: str, model_dir: Path) -> Any:
    """Return the client's report."""
    with running(*models.echoes(model_dir, *TENSORS), "--http-port", "0", transport=transport) as server:
        return report_of(PYTHON, CLIENT, server.ready["http"], tensors=TENSORS)


def test_health(report: Any) -> None:
    assert report["live"] is True
    assert report["ready"] is True
    assert report["model_ready"] == [True, False]


def test_every_datatype_in_every_form(report: Any) -> None:
    assert len(report["echoes"]) == 6 * len(TENSORS) - 3
    for name, (shape, values) in report["echoes"].items():
        sent = TENSORS[name.partition(" ")[0]]
        assert (name, shape, values) == (name, [2, len(sent) // 2], sent)


def test_no_rows_in_every_form(report: Any) -> None:
    """The client then sends both the size 0 of binary data and null as the data."""
    assert report["empty"] == [[[0, 3], []]] * 6


def test_id_name_and_parameters(report: Any) -> None:
    assert report["explained"] == ["seven", "echo-FP32", 1]


def test_many_at_once(report: Any) -> None:
    assert report["concurrent"] == [*range(50)]


def test_errors(report: Any) -> None:
    (unknown, unknown_text), (missing, missing_text) = report["errors"]
    assert (unknown, missing) == (404, 400)
    assert "unknown model: 'nobody'" in unknown_text
    assert "missing required input(s) ['x']" in missing_text
