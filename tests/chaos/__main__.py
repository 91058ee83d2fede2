"""`make soak`: two real servers, callers in their own processes, and every fault at once."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
from chaos import report
from chaos.account import read
from chaos.caller import OWN, state_of
from chaos.content import SUMS, request, verdict, write_app, write_model, write_sums
from chaos.faults import Faults
from chaos.proxy import FaultProxy
from chaos.report import Window
from chaos.servers import PATIENCE, CallerProcesses, Server, build_clock
from chaos.watch import Watch, living_sequences, reconcile
from polling import until
from support.processes import observed, thrower

from tensorferry.protos import inference_pb2_grpc

CALLER_PROCESSES = 3
# Seconds of faults in each minute; then none, with the first seconds for recovery. Less if the soak is shorter.
FAULTY_SECONDS, SETTLING_SECONDS, QUIET_SECONDS = 24.0, 6.0, 30.0
# Number of connections to a server at the end, so that each process has some.
_CONNECTIONS = 16
# What makes a line about a bug no finding: a crash of a worker, a child whose clients have taken all files, and an exception
# that the soak has thrown.
_EXPECTED = ("a worker ended unexpectedly", "file descriptors are lost", thrower.THROWN)
# Too short to tell a trend from chance.
LEAST_MINUTES_FOR_TRENDS = 4.0


def main() -> int:
    """Return 0 if everything that must hold does."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--processes", type=int, default=1, help="processes of each server; several are killed one by one"
    )
    parser.add_argument("--out", type=Path, help="folder for soak.json, soak.md and the logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        folder = Path(scratch) if options.out is None else options.out
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("*.ledger"), *folder.glob("*.log")):
            old.unlink()
        temporary = Path(scratch) / "temporary"
        temporary.mkdir()
        sockets = Path(scratch) / "sockets"
        sockets.mkdir()
        record = soak(options.minutes, options.seed, folder, temporary, sockets, options.processes)
        (folder / "soak.json").write_text(json.dumps(record, indent=1) + "\n")
        text = report.markdown(record)
        (folder / "soak.md").write_text(text)
    print(text)
    for what in (*record["wrong"], *record["ledger"]["violations"]):
        print(what, file=sys.stderr)
    return 0 if all(record["verdicts"].values()) else 1


def soak(
    minutes: float, seed: int, folder: Path, temporary: Path, sockets: Path, processes: int
) -> dict[str, Any]:
    """Run the soak; return its findings. Servers have their temporary files, and sockets, in folders with a short path."""
    shared_memory = observed.dev_shm_files()
    repository = folder / "repository"
    write_model(repository / "swapped" / "1" / "model.onnx")
    write_sums(repository / SUMS)
    models = [f"{name}={write_model(folder / f'{name}.onnx')}" for name in ("affine", "shaky")]
    models.append(str(write_app(folder)))
    arguments = [
        *models, "--model-repository", str(repository), "--model-control", "explicit", "--load-model", "*",
    ]  # fmt: skip
    clock = build_clock(folder)
    steady, mortal = (
        Server(
            name,
            transport,
            folder,
            arguments,
            clock,
            processes=processes,
            temporary=temporary,
            sockets=sockets,
            leaks=leaks,
        )
        for name, transport, leaks in (("steady-lane", "lane", False), ("mortal-threaded", "threaded", True))
    )
    for server in (steady, mortal):
        server.start()
    proxy = FaultProxy(steady.port)
    callers = CallerProcesses(folder, (steady, mortal), proxy, aborts=processes > 1)
    watch = Watch(lambda: steady.processes, None if processes > 1 else steady.metrics_url)
    faults = Faults(seed, steady, mortal, proxy, callers, repository, clocks=clock is not None)
    if clock is None:
        print("no C compiler: clocks do not jump", file=sys.stderr)
    counters: dict[str, Any] = {}
    try:
        for _ in range(CALLER_PROCESSES):
            callers.start()
        windows = _minutes(minutes, faults)
        callers.stop()
        watch.close()
        for server in (steady, mortal):
            until(lambda: _refusals(server), lambda found: not found, seconds=PATIENCE)  # noqa: B023
            # Those without an end end after a while.
            until(lambda: living_sequences(server.metrics_url), lambda found: not found, seconds=PATIENCE)  # noqa: B023
            counters[server.name] = reconcile(server.metrics_url, 30.0)
        mortal.end(signal.SIGKILL)
        # Its next life removes what it has left.
        mortal.start()
    finally:
        watch.close()
        proxy.close()
        for server in (steady, mortal):
            if server.running is not None and server.running.process.poll() is None:
                code = server.end(signal.SIGTERM)
                if code:
                    faults.wrong.append(f"{server.name} ended with {code} at last")
    left = [f"process {process} has not ended" for process in observed.with_argument(str(repository))]
    left += [f"{name} was left" for name in os.listdir(temporary)]
    left += [*watch.in_dev_shm, *observed.left_in_dev_shm(shared_memory)]
    account = read(callers.ledgers, callers.killed)
    wrong = [*faults.wrong, *callers.failed, *_bugs(folder)]
    rows = report.latencies(windows, account.answers)
    grown = report.growth(watch.samples, windows)
    found = report.verdicts(
        account, grown, rows, counters, wrong, left, long=minutes >= LEAST_MINUTES_FOR_TRENDS
    )
    states: dict[str, dict[str, int]] = {}
    for (kind, state), count in account.states.items():
        states.setdefault(kind, {})[state] = count
    named = {
        "lost": account.lost,
        "doubled": account.doubled,
        "crossed": account.crossed,
        "unexplained": account.unexplained,
    }
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"make soak MINUTES={minutes:g}" + (f" PROCESSES={processes}" if processes > 1 else ""),
        "versions": f"Python {platform.python_version()}, grpcio {version('grpcio')}, onnxruntime {version('onnxruntime')}",
        "seed": seed,
        "verdicts": found,
        "ledger": {
            "sent": account.sent,
            "left": account.left,
            "states": states,
            **{name: len(calls) for name, calls in named.items()},
            "violations": [f"{name}: {call}" for name, calls in named.items() for call in calls[:20]],
        },
        "faults": {
            **faults.done,
            **{f"an exception in {name}": count for name, count in sorted(faults.thrown.items())},
            "lives of the mortal server": mortal.lives,
            **({"server processes that died": _deaths(folder)} if processes > 1 else {}),
        },
        "counters": counters,
        "growth": grown,
        "windows": rows,
        "wrong": [*wrong, *left],
    }


def _minutes(minutes: float, faults: Faults) -> list[Window]:
    """Alternate faults and quiet periods until the time is over."""
    windows: list[Window] = []
    share = min(1.0, minutes)
    over = time.monotonic() + 60 * minutes
    while time.monotonic() < over:
        begin = time.monotonic()
        faults.inject(share * FAULTY_SECONDS)
        end = time.monotonic()
        windows.append(Window(begin, end, faults=True))
        time.sleep(share * SETTLING_SECONDS)
        begin = time.monotonic()
        time.sleep(share * QUIET_SECONDS)
        windows.append(Window(begin, time.monotonic(), faults=False))
    return windows


def _refusals(server: Server) -> list[str]:
    """Send a request over each of many connections. Return the statuses of those that are not answered."""
    found = []
    for number in range(_CONNECTIONS):
        with grpc.insecure_channel(server.address, OWN) as channel:
            stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                state = verdict(
                    stub.ModelInfer(request("affine", 0, number, 1), timeout=PATIENCE), 0, number, 1
                )
            except grpc.RpcError as error:
                state = state_of(error, "affine")
            if state != "OK":
                found.append(f"{server.name}: {state}")
    return found


def _deaths(folder: Path) -> int:
    """Return how many server processes died by a signal, which requests that abort the model also cause."""
    lines = [line for log in folder.glob("*.log") for line in log.read_text().splitlines()]
    return sum('"server ' in line and "ended: killed by" in line for line in lines)


def _bugs(folder: Path) -> list[str]:
    """Return log lines of the servers that no injected fault explains."""
    found = []
    for log in folder.glob("*.log"):
        for line in log.read_text().splitlines():
            expected = any(text in line for text in _EXPECTED)
            if ("this is a bug" in line or "(bug)" in line) and not expected:
                found.append(f"{log.name}: {line[:2000]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
