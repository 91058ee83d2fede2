"""Pure parts around the load generator: command line, output, request bodies."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from serving.encodings import ID, JSON, JSON_ROWS, MSGPACK, RAW, grpc_frame, grpc_message, grpc_output
from serving.load import Load, LoadError, Measured, parse, shape_of
from serving.memory import is_flat
from serving.workloads import MLP, TINY, TRANSFORMER
from tensorferry.protos import inference_pb2 as pb

MEASURED = Measured(10, 1, 0, 2.0, 5.0, 1.0, 1.0, 2.0, 3.0, 4.0, 0.1, 8.0, 100.0, 0.2, "")


def test_the_line_is_read_as_printed() -> None:
    assert parse(json.dumps(asdict(MEASURED))) == MEASURED


@pytest.mark.parametrize(
    "line", ["", "no", "{}", '{"answers": 1}', json.dumps({**asdict(MEASURED), "more": 1})]
)
def test_any_other_output_is_an_error(line: str) -> None:
    with pytest.raises(LoadError, match="not the load generator's line"):
        parse(line)


def test_a_load_without_an_answer_is_an_error_that_names_the_last_message() -> None:
    line = json.dumps({**asdict(MEASURED), "answers": 0, "last_message": "unknown model"})
    with pytest.raises(LoadError, match="unknown model"):
        parse(line)


@pytest.mark.parametrize(
    ("pattern", "in_flight", "http", "expected"),
    [
        ("unary", 1, False, ("unary", 1, 1, 1)),
        ("unary", 128, False, ("unary", 4, 32, 1)),
        ("unary", 128, True, ("http1", 128, 1, 1)),
        ("one stream", 32, False, ("stream", 1, 1, 32)),
        ("streams", 32, False, ("stream", 4, 8, 1)),
        ("open", 0, False, ("unary", 4, 1, 1)),
    ],
)
def test_requests_in_flight_are_spread_over_connections(
    pattern: str, in_flight: int, http: bool, expected: tuple[str, int, int, int]
) -> None:
    shape = shape_of(pattern, in_flight, http)
    assert (shape.mode, shape.connections, shape.streams, shape.in_flight) == expected


def test_batches_are_counted_only_when_asked_for() -> None:
    load = Load(1, "/", Path("body"), shape_of("unary", 1, False), 1.0, 0.5, 16)
    assert "--count-batches" not in load.words()
    assert "--least-bytes=16" in load.words()


def test_a_frame_is_a_length_and_a_request_with_one_place_for_an_id() -> None:
    message = grpc_message(TINY, TINY.row(), explain=True)
    frame = grpc_frame(message)
    assert frame[:5] == b"\0" + len(message).to_bytes(4, "big")
    assert frame.count(ID.encode()) == 1
    request = pb.ModelInferRequest.FromString(frame[5:])
    assert (request.model_name, request.id) == ("tiny", ID)
    assert request.parameters["explain"].bool_param
    assert request.raw_input_contents[0] == TINY.row().tobytes()


def test_raw_and_typed_answers_read_the_same() -> None:
    raw = pb.ModelInferResponse(raw_output_contents=[np.array([1, 2], np.float32).tobytes()])
    typed = pb.ModelInferResponse()
    typed.outputs.add().contents.fp32_contents.extend([1, 2])
    assert grpc_output(raw).tolist() == grpc_output(typed).tolist() == [1.0, 2.0]


def test_each_http_encoding_decodes_its_servers_answer() -> None:
    row = MLP.row()
    assert RAW.decode(RAW.encode(row)).tolist() == row[0].tolist()
    assert JSON.decode(JSON.encode(row)).tolist() == row[0].tolist()
    assert MSGPACK.decode(MSGPACK.encode(row)).tolist() == row[0].tolist()
    rows = json.dumps(json.loads(JSON_ROWS.encode(row))["rows"]).encode()
    assert JSON_ROWS.decode(rows).tolist() == row[0].tolist()


@pytest.mark.parametrize("head", [b"\xc4\x04", b"\xc5\x00\x04", b"\xc6\x00\x00\x00\x04"])
def test_msgpack_has_three_lengths_of_bytes(head: bytes) -> None:
    assert MSGPACK.decode(b"\x81\xa1b" + head + np.float32(3).tobytes()).tolist() == [3.0]
    with pytest.raises(ValueError, match="not a map"):
        MSGPACK.decode(b"\x81\xa1c" + head)


def test_a_row_is_the_same_every_time() -> None:
    for workload in (TINY, MLP, TRANSFORMER):
        assert workload.row().tolist() == workload.row().tolist()
        assert workload.row().shape == (1, workload.width)


def test_memory_is_flat_within_a_twentieth_or_ten_mebibytes() -> None:
    assert is_flat([100.0, 150.0, 109.0])
    assert is_flat([1000.0, 1049.0])
    assert not is_flat([100.0, 111.0])
