"""Process of callers: each records a call before it sends it, and then its outcome.

Lines of the ledger: `S tag deadline time kind mark`, the deadline in seconds from then (-: none);
and `E tag state time`. Times are of CLOCK_MONOTONIC, which all processes share. SIGTERM ends the
process once every call has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import threading
import time
from http.client import HTTPConnection, HTTPException
from typing import Any

import grpc
import numpy as np
from chaos.content import IDLE_SECONDS, SUMS, Mark, request, rows_of, verdict, verdict_of

from tensorferry.client import InferenceClient, InferenceError
from tensorferry.protos import inference_pb2_grpc

ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}})
ROUND_ROBIN = (("grpc.service_config", ROBIN), ("grpc.max_reconnect_backoff_ms", 1000))
OWN = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

# How often a request to the failing model is marked, and how.
MARKED = 0.004
MARKS = (
    Mark.RAISE, Mark.RAISE, Mark.SHAPE, Mark.EXIT, Mark.LEAK, Mark.LEAK, Mark.BREAK, Mark.HANG, Mark.FALL,
    Mark.FALL,
)  # fmt: skip
# How often it is marked to abort the model's process, if that leaves the server alive: some times a minute.
ABORTED = 0.0001
IN_A_STREAM = 12
IN_A_SEQUENCE = 12
# The status codes of gRPC for those of HTTP.
HTTP_STATES = {
    404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 500: "INTERNAL", 503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}  # fmt: skip
# How the server refuses a request of a sequence that it does not have, and the state of such a call.
LOST_WORDS = ("must specify the START flag", "begin it again with sequence_start")
LOST = "LOST_STATE"
# Seconds after which a call without a deadline is lost; with a deadline, seconds after it.
ENDLESS_SECONDS, GRACE_SECONDS = 60.0, 20.0


class Ledger:
    """One line for each event, written at once, so that SIGKILL leaves whole lines. Thread-safe."""

    def __init__(self, path: str, sender: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._sender = sender
        # Guards _numbers.
        self._lock = threading.Lock()
        self._numbers = 0

    def sent(self, kind: str, timeout: float | None, mark: Mark) -> int:
        """Record a request that is about to be sent; return its number."""
        with self._lock:
            self._numbers += 1
            number = self._numbers
        deadline = "-" if timeout is None else f"{timeout:.3f}"
        self._write(f"S {self._sender}.{number} {deadline} {time.monotonic():.6f} {kind} {mark.name}\n")
        return number

    def ended(self, number: int, state: str) -> None:
        """Record its outcome."""
        self._write(f"E {self._sender}.{number} {state.replace(' ', '_')} {time.monotonic():.6f}\n")

    def _write(self, line: str) -> None:
        os.write(self._file, line.encode())


class Callers:
    """The threads of this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._aborted = ABORTED if options.aborts else 0.0
        self._sender: int = options.sender
        self._ledger = Ledger(options.ledger, options.sender)
        self._stop = threading.Event()
        # Waited for, because a handler could run while its thread holds the lock of the event, and wait for itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def run(self) -> None:
        """Call until SIGTERM, and then until every call has ended."""
        kinds = (
            *(self._robin, self._robin, self._bundled, self._proxied, self._stream, self._proxied_stream),
            *(self._sequences, self._proxied_sequences, self._mortal_sequences),
            *(self._http, self._mortal_http),
        )
        threads = [
            threading.Thread(target=kind, args=(random.Random(f"{self._sender}/{index}"),), daemon=True)
            for index, kind in enumerate(kinds)
        ]
        for thread in threads:
            thread.start()
        signal.sigwait([signal.SIGTERM])
        self._stop.set()
        until = time.monotonic() + ENDLESS_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        # A call that has not ended by now is lost, and the ledger says so.
        os._exit(0)

    def _draw(self, chance: random.Random) -> tuple[str, int, Mark]:
        model = chance.choice(("affine", "affine", "affine", "function", "shaky", "swapped"))
        drawn, mark = chance.random(), Mark.NONE
        if model == "shaky" and drawn < self._aborted:
            mark = Mark.ABORT
        elif model == "shaky" and drawn < self._aborted + MARKED:
            mark = chance.choice(MARKS)
        return model, chance.choice((1, 1, 1, 2, 5, 40)), mark

    def _pause(self, chance: random.Random, state: str) -> None:
        time.sleep(
            chance.uniform(0.05, 0.2) if state.startswith("UNAVAILABLE") else chance.uniform(0.004, 0.03)
        )

    def _unary(
        self, channel: grpc.Channel, kind: str, chance: random.Random, timeouts: tuple[float | None, ...]
    ) -> None:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        while not self._stop.is_set():
            model, rows, mark = self._draw(chance)
            timeout = chance.choice(timeouts)
            number = self._ledger.sent(kind, timeout, mark)
            try:
                response = stub.ModelInfer(request(model, self._sender, number, rows, mark), timeout=timeout)
                state = verdict(response, self._sender, number, rows, mark)
            except grpc.RpcError as error:
                state = state_of(error, model)
            self._ledger.ended(number, state)
            self._pause(chance, state)

    def _robin(self, chance: random.Random) -> None:
        with grpc.insecure_channel(self._options.servers, ROUND_ROBIN) as channel:
            self._unary(channel, "round_robin", chance, (None, 0.1, 1.0, 5.0))

    def _proxied(self, chance: random.Random) -> None:
        with grpc.insecure_channel(self._options.proxy, OWN) as channel:
            self._unary(channel, "proxied", chance, (0.3, 1.0, 3.0))

    def _bundled(self, chance: random.Random) -> None:
        with InferenceClient(self._options.servers, options=ROUND_ROBIN, check=False) as client:
            while not self._stop.is_set():
                model, rows, mark = self._draw(chance)
                timeout = chance.choice((None, 0.2, 2.0))
                number = self._ledger.sent("bundled", timeout, mark)
                x, name = rows_of(self._sender, number, rows, mark), f"{self._sender}.{number}"
                try:
                    result = client.infer(model, {"x": x}, request_id=name, timeout=timeout)
                    state = verdict_of(result["y"], result.id, x, name)
                except InferenceError as error:
                    state = allowed(error.code.name, str(error), model)
                self._ledger.ended(number, state)
                self._pause(chance, state)

    def _stream(self, chance: random.Random) -> None:
        self._streams(self._options.first, "stream", chance)

    def _proxied_stream(self, chance: random.Random) -> None:
        self._streams(self._options.proxy, "proxied_stream", chance)

    def _streams(self, target: str, kind: str, chance: random.Random) -> None:
        with grpc.insecure_channel(target, OWN) as channel:
            while not self._stop.is_set():
                self._one_stream(channel, kind, chance)
                self._pause(chance, "OK")

    def _one_stream(self, channel: grpc.Channel, kind: str, chance: random.Random) -> None:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        timeout = chance.choice((1.0, 4.0))
        order = chance.choice(("request", "completion"))
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call = stub.ModelStreamInfer(
            iter(waiting.get, None), timeout=timeout, metadata=(("tensorferry-stream-order", order),)
        )
        # By number: rows, mark and model.
        open_calls: dict[int, tuple[int, Mark, str]] = {}
        for _ in range(IN_A_STREAM):
            model, rows, mark = self._draw(chance)
            number = self._ledger.sent(kind, timeout, mark)
            open_calls[number] = (rows, mark, model)
            waiting.put(request(model, self._sender, number, rows, mark))
        waiting.put(None)
        end = "NO_ANSWER"
        try:
            for response in call:
                number = int(response.infer_response.id.partition(".")[2])
                rows, mark, model = open_calls.pop(number, (0, Mark.NONE, ""))
                if response.error_message:
                    code = response.infer_response.parameters["tensorferry_status"].string_param
                    state = allowed(code, response.error_message, model)
                else:
                    state = verdict(response.infer_response, self._sender, number, rows, mark)
                # A call that is no longer open was answered twice, and the ledger says so.
                self._ledger.ended(number, state)
        except grpc.RpcError as error:
            end = state_of(error, "")
        for number in open_calls:
            self._ledger.ended(number, end)

    def _http(self, chance: random.Random) -> None:
        self._all_http(int(self._options.http.partition(",")[0]), "http", chance)

    def _mortal_http(self, chance: random.Random) -> None:
        self._all_http(int(self._options.http.partition(",")[2]), "mortal_http", chance)

    def _all_http(self, port: int, kind: str, chance: random.Random) -> None:
        """Send binary tensors over HTTP/1.1, on one connection while it works."""
        connection = HTTPConnection("127.0.0.1", port, timeout=GRACE_SECONDS / 2)
        while not self._stop.is_set():
            model, rows, mark = self._draw(chance)
            timeout = chance.choice((None, 0.2, 2.0))
            number = self._ledger.sent(kind, timeout, mark)
            x, name = rows_of(self._sender, number, rows, mark), f"{self._sender}.{number}"
            try:
                status, message, y, answered = post(connection, model, name, x, timeout)
                state = (
                    verdict_of(y, answered, x, name)
                    if status == 200
                    else allowed(HTTP_STATES.get(status, str(status)), message, model)
                )
            except TimeoutError:
                connection.close()
                state = "DEADLINE_EXCEEDED"
            except (OSError, HTTPException):
                connection.close()
                state = "UNAVAILABLE"
            self._ledger.ended(number, state)
            self._pause(chance, state)

    def _sequences(self, chance: random.Random) -> None:
        self._all_sequences(self._options.first, "sequence", chance)

    def _proxied_sequences(self, chance: random.Random) -> None:
        self._all_sequences(self._options.proxy, "proxied_sequence", chance)

    def _mortal_sequences(self, chance: random.Random) -> None:
        self._all_sequences(self._options.servers.rpartition(",")[2], "mortal_sequence", chance)

    def _all_sequences(self, target: str, kind: str, chance: random.Random) -> None:
        with grpc.insecure_channel(target, OWN) as channel:
            while not self._stop.is_set():
                self._one_sequence(channel, kind, chance)

    def _one_sequence(self, channel: grpc.Channel, kind: str, chance: random.Random) -> None:
        """Send the requests of a sequence, and check each sum. Some sequences are left without an end."""
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        steps, ends = chance.randint(1, IN_A_SEQUENCE), chance.random() < 0.8
        # The sums that the server can have: also with a request that failed, whose answer may have been lost on the way.
        sums: list[Any] = [0.0]
        # The server may lose a sequence with its process.
        lost = self._aborted > 0 or kind == "mortal_sequence"
        failures, sequence, answered = 0, "", time.monotonic()
        for step in range(steps):
            mark = chance.choice(MARKS) if chance.random() < MARKED else Mark.NONE
            timeout = chance.choice((None, None, 0.1, 2.0))
            number = self._ledger.sent(kind, timeout, mark)
            sequence = sequence or f"{self._sender}.{number}"
            message = request(SUMS, self._sender, number, 1, mark)
            message.parameters["sequence_id"].string_param = sequence
            message.parameters["sequence_start"].bool_param = step == 0
            message.parameters["sequence_end"].bool_param = ends and step == steps - 1
            x = rows_of(self._sender, number, 1, mark)
            late = time.monotonic() - answered > IDLE_SECONDS / 2
            try:
                response = stub.ModelInfer(message, timeout=timeout)
                y = np.frombuffer(response.raw_output_contents[0], np.float32)
                right = response.id == message.id and any((y == past + x[0]).all() for past in sums)
                state = "OK" if right else f"CROSSED({response.id}:{y.tolist()})"
                sums, failures = [y], 0
            except grpc.RpcError as error:
                failures += 1
                refused = any(words in str(error.details()) for words in LOST_WORDS)
                state = LOST if refused and (lost or late or failures > 1) else state_of(error, SUMS)
                sums += [past + x[0] for past in sums]
            self._ledger.ended(number, state)
            self._pause(chance, state)
            answered = time.monotonic()
            # After a failure the next request tells what the server has kept.
            if failures > 1:
                return


def post(
    connection: HTTPConnection, model: str, name: str, x: Any, timeout: float | None
) -> tuple[int, str, Any, str]:
    """Send an inference request; return the status, the body, the output of status 200, and the id of its answer."""
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": list(x.shape),
        "parameters": {"binary_data_size": x.nbytes},
    }
    head = json.dumps({"id": name, "inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    if timeout is not None:
        headers["X-Request-Timeout"] = str(timeout)
    connection.request("POST", f"/v2/models/{model}/infer", head + x.tobytes(), headers)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        return answer.status, body.decode(), None, ""
    size = int(answer.headers["Inference-Header-Content-Length"])
    described = json.loads(body[:size])
    y = np.frombuffer(body[size:], np.float32).reshape(described["outputs"][0]["shape"])
    return answer.status, "", y, described["id"]


def state_of(error: Any, model: str) -> str:
    """Return the name of its status, with the message if the status is unexpected."""
    return allowed(error.code().name, str(error.details()), model)


def allowed(code: str, message: str, model: str) -> str:
    """Return whether a call to the model may end by this status."""
    known = code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED")
    if known or (code == "INTERNAL" and any(words in message for words in ("the model", "internal error"))):
        return code
    if code == "NOT_FOUND" and model == "swapped":
        return code
    return f"{code}({message[:200]})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--servers", "--first", "--proxy", "--http", "--ledger"):
        parser.add_argument(name, required=True)
    parser.add_argument("--sender", type=int, required=True)
    parser.add_argument("--aborts", action="store_true", help="let requests abort the model's process")
    Callers(parser.parse_args()).run()
