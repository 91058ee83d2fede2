"""Encodings of a row for each kind of server, and decoding of its answer."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.workloads import Array, Workload
from tensorferry.protos import inference_pb2 as pb

# The load generator writes numbers into these digits; see generator/grpc.c.
ID = "#0000000"
_PREFIX = struct.Struct(">BI")
_MSGPACK_KEY, _MSGPACK_BIN32 = b"\x81\xa1b", 0xC6  # A map with one entry, "b", whose value follows.

Output = npt.NDArray[np.float32]


def grpc_message(workload: Workload, row: Array, *, explain: bool = False) -> bytes:
    """Return a ModelInferRequest."""
    request = pb.ModelInferRequest(model_name=workload.model, id=ID, raw_input_contents=[row.tobytes()])
    request.inputs.add(name=workload.input_name, datatype=workload.datatype, shape=row.shape)
    if explain:
        request.parameters["explain"].bool_param = True
    return request.SerializeToString()


def grpc_frame(message: bytes) -> bytes:
    """Return a message with its length prefix, the content of a DATA frame."""
    return _PREFIX.pack(0, len(message)) + message


def grpc_output(response: pb.ModelInferResponse) -> Output:
    """Return the only output, raw or typed."""
    if response.raw_output_contents:
        return np.frombuffer(response.raw_output_contents[0], np.float32)
    return np.array(response.outputs[0].contents.fp32_contents, np.float32)


def _floats(raw: bytes) -> Output:
    return np.frombuffer(raw, np.float32)


def _to_msgpack(row: Array) -> bytes:
    raw = row.tobytes()
    return _MSGPACK_KEY + struct.pack(">BI", _MSGPACK_BIN32, len(raw)) + raw


def _from_msgpack(answer: bytes) -> Output:
    """Decode {"b": bytes}, in any of msgpack's three lengths."""
    kind = answer[len(_MSGPACK_KEY)]
    if not answer.startswith(_MSGPACK_KEY) or not 0xC4 <= kind <= _MSGPACK_BIN32:
        raise ValueError(f"not a map of one entry of bytes: {answer[:20]!r}")
    return _floats(answer[len(_MSGPACK_KEY) + 1 + (1 << (kind - 0xC4)) :])


def _to_json(row: Array) -> bytes:
    return json.dumps({"b": base64.b64encode(row.tobytes()).decode()}).encode()


def _from_json(answer: bytes) -> Output:
    return _floats(base64.b64decode(json.loads(answer)["b"]))


def _to_rows(row: Array) -> bytes:
    return json.dumps({"rows": [base64.b64encode(row.tobytes()).decode()]}).encode()


def _from_rows(answer: bytes) -> Output:
    return _floats(base64.b64decode(json.loads(answer)[0]))


def _v2_head(workload: Workload) -> bytes:
    row = workload.row()
    tensor = {"name": workload.input_name, "shape": row.shape, "datatype": workload.datatype}
    inputs = [{**tensor, "parameters": {"binary_data_size": row.nbytes}}]
    return json.dumps({"id": ID, "inputs": inputs, "parameters": {"binary_data_output": True}}).encode()


def _from_v2(answer: bytes) -> Output:
    found = re.search(rb'"binary_data_size":(\d+)', answer)
    if found is None:
        raise ValueError(f"no binary output: {answer[:200]!r}")
    return _floats(answer[-int(found[1]) :])


@dataclass(frozen=True, slots=True)
class HttpEncoding:
    """Encoding of an HTTP/1.1 request, and decoding of its answer. `head` returns JSON that comes before the row."""

    content_type: str
    encode: Callable[[Array], bytes]
    decode: Callable[[bytes], Output]
    head: Callable[[Workload], bytes] = lambda workload: b""

    def request(self, workload: Workload) -> tuple[bytes, Sequence[tuple[str, str]]]:
        """Return the body, and the headers beside the content type."""
        head = self.head(workload)
        headers = [("Inference-Header-Content-Length", str(len(head)))] if head else []
        return head + self.encode(workload.row()), headers


RAW = HttpEncoding("application/octet-stream", lambda row: row.tobytes(), _floats)
MSGPACK = HttpEncoding("application/msgpack", _to_msgpack, _from_msgpack)
V2 = HttpEncoding("application/octet-stream", RAW.encode, _from_v2, _v2_head)
JSON = HttpEncoding("application/json", _to_json, _from_json)
JSON_ROWS = HttpEncoding("application/json", _to_rows, _from_rows)
