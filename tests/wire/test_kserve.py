"""KServe's inference client, unchanged and in its own environment, against a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.processes.probe import TABLE_ERROR
from support.processes.server import ServerProcess
from support.wire.programs import CLIENTS, needs, report_of

PYTHON = CLIENTS / "kserve" / "bin" / "python"
CLIENT = Path(__file__).resolve().parents[1] / "support" / "wire" / "kserve_client.py"
pytestmark = needs(CLIENTS / "kserve" / ".done")

TENSORS: dict[str, list[Any]] = {
    "BOOL": [True, False, True, True],
    "INT8": [-128, -1, 0, 127],
    "INT16": [-32768, -1, 0, 32767],
    "INT32": [-(2**31), -1, 0, 2**31 - 1],
    "INT64": [-(2**63), -1, 0, 2**63 - 1],
    "UINT8": [0, 1, 128, 255],
    "UINT16": [0, 1, 2**15, 2**16 - 1],
    "UINT32": [0, 1, 2**31, 2**32 - 1],
    "UINT64": [0, 1, 2**63, 2**64 - 1],
    "FP16": [0.5, -2.0, 65504.0, 0.0],
    "FP32": [0.5, -1.5, 16777215.0, 0.0],
    "FP64": [0.1, -1.5, 1e300, 5e-324],
    "BYTES": ["", "a\0b", "zwölf", "終"],
}


@pytest.fixture(scope="module")
def report(echoes: ServerProcess) -> Any:
    """Return the client's report."""
    assert PYTHON.exists(), "CI needs KServe's client: make tools"
    return report_of(PYTHON, CLIENT, echoes.address, tensors=TENSORS)


def test_health(report: Any) -> None:
    assert report["live"] is True
    assert report["ready"] is True
    assert report["model_ready"] == [True, False]


def test_every_datatype_as_an_array_and_as_a_list(report: Any) -> None:
    assert report["raw"] == TENSORS
    assert report["typed"] == {datatype: values for datatype, values in TENSORS.items() if datatype != "FP16"}


def test_id_version_and_parameters(report: Any) -> None:
    assert (report["id"], report["version"], report["batch_rows"]) == ("three", "1", 1)


def test_many_at_once(report: Any) -> None:
    assert report["concurrent"] == [2 * tag for tag in range(50)]


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("mixed", "INVALID_ARGUMENT", "raw_input_contents"),
        ("nobody", "NOT_FOUND", "unknown model: 'nobody'"),
        ("raised", "INTERNAL", TABLE_ERROR),
    ],
)
def test_errors(report: Any, what: str, code: str, message: str) -> None:
    assert report["errors"][what]["code"] == code
    assert message in report["errors"][what]["message"]


def test_the_server_has_no_errors_afterwards(report: Any) -> None:
    assert report["after"] == 16
