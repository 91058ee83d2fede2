"""Clients in Go, Node and Java, with code generated from the .proto files.

Each program does the same things in the way of its language, and reports them: metadata of the
server and of a model; every datatype there and back, raw and typed; a map of parameters; a
compressed request; 8 MB; a hundred calls at once; a stream of two hundred requests with one
failure; errors; an expired deadline; a cancelled call and a cancelled stream; and the server's
health afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.processes.probe import TABLE_ERROR
from support.processes.server import ServerProcess
from support.wire.programs import CLIENTS, needs, report_of

PROTOS = Path(__file__).resolve().parents[2] / "protos"

# FP16 and BF16 as their 16 bits, because none of the languages has a type for them.
TENSORS: dict[str, list[str]] = {
    "BOOL": ["true", "false", "true", "true", "false", "false"],
    "INT8": ["-128", "-1", "0", "1", "2", "127"],
    "INT16": ["-32768", "-1", "0", "1", "2", "32767"],
    "INT32": ["-2147483648", "-1", "0", "1", "2", "2147483647"],
    "INT64": ["-9223372036854775808", "-1", "0", "1", "2", "9223372036854775807"],
    "UINT8": ["0", "1", "2", "127", "128", "255"],
    "UINT16": ["0", "1", "2", "32767", "32768", "65535"],
    "UINT32": ["0", "1", "2", "2147483647", "2147483648", "4294967295"],
    "UINT64": ["0", "1", "2", "9223372036854775807", "9223372036854775808", "18446744073709551615"],
    "FP16": ["0", "1", "15360", "31744", "32256", "65535"],
    "BF16": ["0", "1", "16256", "32640", "32704", "65535"],
    "FP32": ["NaN", "Infinity", "-Infinity", "-1.5", "16777215", "3.4028234663852886e38"],
    "FP64": ["NaN", "Infinity", "-Infinity", "0.1", "5e-324", "1e300"],
    "BYTES": ["", "plain", "zwölf Boxkämpfer", "a\0b", "line\n", "終"],
}
RAW_ONLY = {"FP16", "BF16"}
OK, CANCELLED, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, INTERNAL = 0, 1, 3, 4, 5, 13


@dataclass(frozen=True, slots=True)
class Client:
    """A program that takes the server's address as its last argument, before `after`."""

    installed: Path
    command: tuple[str, ...]
    after: tuple[str, ...] = ()


PROGRAMS = {
    "go": Client(CLIENTS / "go" / "client", (str(CLIENTS / "go" / "client"),)),
    "node": Client(
        CLIENTS / "node" / "node_modules", ("node", str(CLIENTS / "node" / "client.js")), (str(PROTOS),)
    ),
    "java": Client(
        CLIENTS / "java" / "classes" / "Client.class",
        (
            *("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
            *("-cp", f"{CLIENTS / 'java' / 'classes'}:{CLIENTS / 'java' / 'lib'}/*", "Client"),
        ),
    ),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=needs(PROGRAMS[name].installed)) for name in PROGRAMS]
)
def report(request: pytest.FixtureRequest, echoes: ServerProcess) -> Any:
    """Return the report of one program."""
    program = PROGRAMS[request.param]
    assert program.installed.exists(), f"CI needs the client in {request.param}: make tools"
    return report_of(*program.command, echoes.address, *program.after, tensors=TENSORS)


def same(datatype: str, got: list[str], sent: list[str]) -> bool:
    """Return whether the texts have the same values: each language formats floats differently."""
    if datatype not in ("FP32", "FP64"):
        return got == sent
    pairs = list(zip(map(float, got), map(float, sent), strict=True))
    # The text of an FP32 value is nearest to that value only.
    tolerance = 1e-7 if datatype == "FP32" else 0
    return all(math.isclose(a, b, rel_tol=tolerance) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def test_health_and_metadata(report: Any) -> None:
    assert report["live"] is True
    assert report["ready"] is True
    assert report["model_ready"] == {"probe": True, "nobody": False}
    assert report["server"]["name"] == "tensorferry"
    assert "binary_tensor_data" in report["server"]["extensions"]
    assert report["metadata"] == {
        "name": "probe",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [["x", "FP32", [-1, 4]], ["index", "INT64", [-1]], ["work", "INT64", [-1]]],
        "outputs": [["y", "FP32", [-1, 4]]],
    }


def test_raw_contents_of_every_datatype(report: Any) -> None:
    assert report["raw"].keys() == TENSORS.keys()
    for datatype, sent in TENSORS.items():
        assert same(datatype, report["raw"][datatype], sent), (datatype, report["raw"][datatype])


def test_typed_contents_of_every_datatype_that_has_them(report: Any) -> None:
    assert report["typed"].keys() == TENSORS.keys() - RAW_ONLY
    for datatype, got in report["typed"].items():
        assert same(datatype, got, TENSORS[datatype]), (datatype, got)


def test_parameters(report: Any) -> None:
    assert report["parameters"]["batch_rows"] == 1
    assert {"batch_number", "close_reason", "queue_us"} <= set(report["parameters"]["names"])


def test_compressed_large_and_many_at_once(report: Any) -> None:
    assert report["gzip"] == 14
    assert report["large"] is True
    assert report["concurrent"] == [2 * tag for tag in range(100)]


def test_stream_answers_in_request_order_and_survives_an_error(report: Any) -> None:
    assert [answer["id"] for answer in report["stream"]] == [f"r{place}" for place in range(200)]
    for place, answer in enumerate(report["stream"]):
        if place == 11:
            assert TABLE_ERROR in answer["error"]
        else:
            assert (answer["y"], answer["error"]) == (2 * place, "")


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("shape", INVALID_ARGUMENT, "Expected [-1, 4], got [4]"),
        ("half", INVALID_ARGUMENT, "FP16 has no typed contents"),
        ("nobody", NOT_FOUND, "unknown model: 'nobody'"),
        ("raised", INTERNAL, TABLE_ERROR),
        ("deadline", DEADLINE_EXCEEDED, ""),
        ("cancelled", CANCELLED, ""),
        ("stream_cancelled", CANCELLED, ""),
    ],
)
def test_errors(report: Any, what: str, code: int, message: str) -> None:
    assert report["errors"][what]["code"] == code
    assert message in report["errors"][what]["message"]


def test_the_server_has_no_errors_afterwards(report: Any) -> None:
    assert report["after"] == 16
