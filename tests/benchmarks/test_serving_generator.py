"""The load generator against a small server that answers in batches."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.encodings import grpc_frame

_SOURCES = Path(__file__).resolve().parents[2] / "benchmarks" / "serving" / "generator"
_CALLERS = 4
_BATCH_SECONDS = 0.4
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_WAIT_SECONDS = 10


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    looked = subprocess.run(
        [compiler, "-E", "-x", "c", "-"], input=b"#include <nghttp2/nghttp2.h>", capture_output=True
    )
    if looked.returncode:
        pytest.skip("needs the headers of nghttp2")
    built = tmp_path_factory.mktemp("generator") / "load"
    command = [compiler, "-std=gnu11", "-o", str(built), *map(str, sorted(_SOURCES.glob("*.c")))]
    subprocess.run([*command, "-lnghttp2", "-lm"], check=True)
    return built


@contextmanager
def answering_in_batches() -> Iterator[int]:
    """Port of a server that waits for a request on each connection, computes, and answers all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connections = [listener.accept()[0] for _ in range(_CALLERS)]
            try:
                while all(connection.recv(1 << 16) for connection in connections):
                    time.sleep(_BATCH_SECONDS)
                    for connection in connections:
                        connection.sendall(_ANSWER)
            except ConnectionError:
                # The program has ended.
                pass
            finally:
                for connection in connections:
                    connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(_WAIT_SECONDS)


def test_of_a_batch_that_is_partly_in_the_time_measured_a_part_is_counted(
    program: Path, tmp_path: Path
) -> None:
    body = tmp_path / "body"
    body.write_bytes(b"{}")
    with answering_in_batches() as port:
        # A count of whole batches would be two or three, a fifth too few or too many.
        words = [f"--port={port}", f"--body={body}", f"--connections={_CALLERS}", "--seconds=1.0"]
        done = subprocess.run(
            [program, "--mode=http1", *words, "--warm-up=0.2"],
            capture_output=True,
            text=True,
            timeout=_WAIT_SECONDS,
        )
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["answers"] > measured["errors"] == 0
    # Each caller always has one request in flight.
    assert measured["rate"] * measured["mean_ms"] / 1e3 == pytest.approx(_CALLERS, rel=0.1)


@contextmanager
def echoing(seen: Counter[bytes]) -> Iterator[int]:
    """Port of a gRPC server that counts the messages of unary calls and returns them."""

    class Echo(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            def answer(message: bytes, context: Any) -> bytes:
                seen[message] += 1
                return message

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0).wait()


def run_unary(program: Path, port: int, body: Path) -> subprocess.CompletedProcess[str]:
    words = [f"--port={port}", "--path=/a/b", f"--body={body}", "--warm-up=0", "--calls=7", "--seconds=5"]
    return subprocess.run(
        [program, "--mode=unary", *words], capture_output=True, text=True, timeout=_WAIT_SECONDS
    )


def test_calls_send_the_messages_of_the_body_in_turn(program: Path, tmp_path: Path) -> None:
    messages = [b"one", b"two, longer", b""]
    (tmp_path / "body").write_bytes(b"".join(map(grpc_frame, messages)))
    seen: Counter[bytes] = Counter()
    with echoing(seen) as port:
        done = run_unary(program, port, tmp_path / "body")
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["errors"] == 0
    assert set(seen) == set(messages)
    # A call that was sent after the last counted answer may not have arrived.
    assert max(seen.values()) - min(seen.values()) <= 1


@pytest.mark.parametrize("body", [b"", b"\0\0\0\0\5only", b"\0\0"])
def test_a_body_that_is_not_whole_messages_is_refused(program: Path, tmp_path: Path, body: bytes) -> None:
    (tmp_path / "body").write_bytes(body)
    with echoing(Counter()) as port:
        done = run_unary(program, port, tmp_path / "body")
    assert done.returncode == 1
    assert "--body" in done.stderr
