"""docs/reference/protocol.md lists code and message of each error: each row is provoked over the wire."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from support.processes import models
from support.processes.server import ServerProcess
from support.wire import provoking_control, provoking_memory, provoking_requests
from support.wire.provoking import KEY, Provoke, Served
from support.wire.rig import PATIENCE

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "protocol.md"


class Row(NamedTuple):
    when: str
    triton: str
    here: str
    text: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().partition("## Errors")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch("[A-Z_]+", cells[1]):
            when, triton, _, here, text = cells
            found.append(Row(when, triton, here, text))
    return found


# Configuration by model; `loads` waits for its labels, which come through a pipe.
REPOSITORY = {
    "loads": 'output { name: "y" data_type: TYPE_FP32 dims: [-1] label_filename: "labels.txt" }',
    "decoupled": "model_transaction_policy { decoupled: true }",
    "sequences": "sequence_batching { }",
    "broken": "max_batch_size: -1",
}


def repository_in(directory: Path) -> Path:
    for name, config in REPOSITORY.items():
        (directory / name / "1").mkdir(parents=True)
        models.echo(directory / name / "1" / "model.onnx")
        (directory / name / "config.pbtxt").write_text(config)
    os.mkfifo(directory / "loads" / "labels.txt")
    return directory


TABLES = (provoking_requests.PROVOKED, provoking_memory.PROVOKED, provoking_control.PROVOKED)
PROVOKED: dict[str, Provoke] = {case: provoke for table in TABLES for case, provoke in table.items()}


@pytest.fixture(scope="module")
def served(
    transport: str,
    model_dir: Path,
    probe_model: Path,
    plain: ServerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    texts = models.echo(model_dir / "texts.onnx", "BYTES")
    floats = models.echo(model_dir / "floats.onnx")
    file = Path("/dev/shm") / KEY.lstrip("/")
    file.write_bytes(bytes(64))
    repository = repository_in(tmp_path_factory.mktemp("repository"))
    server = ServerProcess.start(
        *("--allow-shared-memory", "--device", "cpu", probe_model, texts, floats),
        transport=transport,
        # Hides real devices.
        variables={"CUDA_VISIBLE_DEVICES": ""},
    )
    control = ServerProcess.start(
        *("--model-repository", repository, "--model-control", "explicit", "--exit-on-error", "false"),
        *("--load-model", "decoupled", "--load-model", "sequences"),
        transport=transport,
    )
    try:
        with (
            grpc.insecure_channel(server.address) as channel,
            grpc.insecure_channel(control.address) as controlled,
            grpc.insecure_channel(plain.address) as unshared,
        ):
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.SystemSharedMemoryRegister(
                pb.SystemSharedMemoryRegisterRequest(name="r", key=KEY, byte_size=64), timeout=PATIENCE
            )
            yield Served(
                stub,
                inference_pb2_grpc.GRPCInferenceServiceStub(controlled),
                inference_pb2_grpc.GRPCInferenceServiceStub(unshared),
                repository,
                transport,
                probe_model,
            )
    finally:
        file.unlink()
        assert [server.stop(), control.stop()] == [0, 0]
    assert not server.errors(), "".join(server.log)


def test_every_row_is_provoked_and_no_other_error() -> None:
    assert [row.when for row in rows()] == list(dict.fromkeys(row.when for row in rows()))
    assert {row.when for row in rows()} == PROVOKED.keys()
    assert len(PROVOKED) == sum(map(len, TABLES))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.when)
def test_each_row_of_the_page_is_true(served: Served, row: Row) -> None:
    if row.here == "OK":
        assert PROVOKED[row.when](served)
        return
    with pytest.raises(grpc.RpcError) as caught:
        PROVOKED[row.when](served)
    error: Any = caught.value
    text = row.text.removeprefix("`").removesuffix("`")
    assert (error.code().name, text in error.details()) == (row.here, True), error.details()
