"""Measurement of one server: start it, check its answer, measure its cells, stop it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from serving.encodings import ID, Output, grpc_frame, grpc_message
from serving.load import STREAM_PATH, UNARY_PATH, Load, LoadError, Measured, run_load, shape_of
from serving.plan import ONE_STREAM, OPEN, RAW, RAW_ROWS, STREAMS, UNARY, Cell, Visit
from serving.probe import check, expected_output
from serving.processes import Cores, Ports, Running, busy_seconds, cpu_seconds, memory_mib, running
from serving.servers import MAX_BATCH_SIZE, OURS, Server, servers
from serving.workloads import Workload

BENCHMARKS = Path(__file__).resolve().parents[1]
# A model that is warmed up at many batch sizes and lengths takes more than a minute on one core.
_START_SECONDS = 180
_RAW_SECONDS = 1.0
# Share of a core that other processes may use. Above it a cell is measured again, and the quieter
# result counts.
_NOISY_CORES = 0.3
_EXPLAIN_SHARE = 0.35

Row = dict[str, Any]


class VisitError(Exception):
    """A server could not be measured."""


@dataclass(slots=True)
class Bench:
    """Paths and results so far: `rows`, and `failures` with their reasons."""

    cache: Path
    program: Path
    cores: Cores
    retries: int = 1
    rows: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)
    _ports: Ports = field(default_factory=Ports)
    _expected: dict[str, Output] = field(default_factory=dict)

    def visit(self, visit: Visit, number: int) -> None:
        """Measure a server: add rows, or a failure, and print a line for each."""
        try:
            self._visit(servers()[visit.server], visit, number)
        except (VisitError, LoadError) as error:
            self._failed(visit, number, str(error))

    def _visit(self, server: Server, visit: Visit, number: int) -> None:
        left = list(visit.cells)
        while left:
            with self.started(server, left[0].workload) as (serving, seconds):
                # The failure of one cell does not affect the others; a server that has ended is
                # started again.
                while left and serving.ended() is None:
                    cell = left.pop(0)
                    try:
                        row = self._cell(server, serving, cell, number)
                    except LoadError as error:
                        ended = "" if serving.ended() is None else f" (exit status {serving.ended()})"
                        self._failed(visit, number, f"{_asked(cell)}: {error}{ended}")
                        continue
                    row["start_seconds"] = round(seconds, 2)
                    self.rows.append(row)
                    print(_line(row), flush=True)
                    if cell.ceiling:
                        self._raw(cell.workload, row)

    def _failed(self, visit: Visit, number: int, reason: str) -> None:
        self.failures.append(
            {"round": number, "server": visit.server, "model": visit.model, "reason": reason}
        )
        print(f"FAILED {visit.server}, {visit.model}: {reason}", flush=True)

    @property
    def spare_port(self) -> int:
        """Return a free port, for what a server serves beside gRPC."""
        return self._ports.take()

    @contextmanager
    def started(
        self, server: Server, workload: Workload, *options: str, headers: Sequence[tuple[str, str]] = ()
    ) -> Iterator[tuple[Running, float]]:
        """Start a server; yield it once it has given a right answer, with its start-up time in
        seconds. Raises VisitError.
        """
        port, model = self._ports.take(), workload.path(self.cache)
        expected = self._expect(workload)
        command = server.command(self.python(server.peer), workload, model, port)
        variables = {
            "SERVING_BENCH_MODEL": str(model),
            "SERVING_BENCH_WINDOW_MS": f"{server.window(workload):g}",
        }

        def ready() -> None:
            check(server, workload, port, expected, stream=False, headers=headers)

        with self.command_started([*command, *options], port, server.peer, variables, ready) as started:
            yield started

    def python(self, peer: str) -> Path:
        """Return the interpreter of a peer's environment; "" is this one."""
        return self.cache / "peers" / peer / "bin" / "python" if peer else Path(sys.executable)

    @contextmanager
    def command_started(
        self,
        command: Sequence[str],
        port: int,
        peer: str,
        variables: Mapping[str, str],
        ready: Callable[[], None],
    ) -> Iterator[tuple[Running, float]]:
        """Start a server in a peer's environment; yield it once `ready` raises nothing, as `started` does."""
        environment = self._environment(peer, {**variables, "SERVING_BENCH_PORT": str(port)})
        began = time.monotonic()
        with running(command, environment, BENCHMARKS, self.cores.of_server(), port) as serving:
            _await(serving, ready)
            yield serving, time.monotonic() - began

    def _environment(self, peer: str, variables: Mapping[str, str]) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TENSORFERRY_")}
        paths = [str(BENCHMARKS)]
        if peer:
            # Triton's stub loads libpython by name; it must be that of this interpreter.
            kept["LD_LIBRARY_PATH"] = str(self.python(peer).resolve().parents[1] / "lib")
        elif kept.get("PYTHONPATH"):
            paths.append(kept["PYTHONPATH"])
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "SERVING_BENCH_MAX_BATCH_SIZE": str(MAX_BATCH_SIZE),
            "BENTOML_DO_NOT_TRACK": "True",
            "DO_NOT_TRACK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "LITSERVE_DISABLE_VERSION_CHECK": "1",
            **variables,
        }

    def _expect(self, workload: Workload) -> Output:
        if workload.name not in self._expected:
            self._expected[workload.name] = expected_output(workload, workload.path(self.cache))
        return self._expected[workload.name]

    def load_of(
        self, server: Server, workload: Workload, port: int, cell: Cell, *, explain: bool = False
    ) -> Load:
        """Return the load of a cell, with its body written to the cache."""
        if server.http:
            (body, headers), id_offset = server.http.request(workload), -1
        else:
            headers = ()
            body = grpc_frame(grpc_message(workload, workload.row(), explain=explain))
            id_offset = body.index(ID.encode())
        path = self.cache / "bodies" / f"{workload.name}-{server.name}-{explain}".replace(" ", "")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(body)
        method = STREAM_PATH if cell.pattern in (ONE_STREAM, STREAMS) else UNARY_PATH
        return Load(
            port,
            server.http_path.format(model=workload.model) if server.http else method,
            path,
            shape_of(cell.pattern, cell.in_flight, server.http is not None),
            cell.seconds,
            cell.warm_up,
            least_bytes=self._expect(workload).nbytes,
            id_offset=id_offset,
            content_type=server.http.content_type if server.http else "application/grpc",
            count_batches=explain,
            headers=headers,
        )

    def _cell(self, server: Server, serving: Running, cell: Cell, number: int) -> Row:
        try:
            check(
                server,
                cell.workload,
                serving.port,
                self._expect(cell.workload),
                stream=cell.pattern in (ONE_STREAM, STREAMS),
            )
        except Exception as error:
            # Without a right answer there is nothing to measure, whatever the client raised.
            raise LoadError(f"no right answer: {error}") from error
        load = self.load_of(server, cell.workload, serving.port, cell)
        if cell.pattern == OPEN:
            rate = cell.share * self._capacity(server, cell, number)
            load = replace(load, rate=rate, seed=number + 1)
        rows: list[Row] = []
        for left in range(self.retries, -1, -1):
            try:
                rows.append(self.measured(serving, load))
            except LoadError:
                if not rows and (left == 0 or serving.ended() is not None):
                    raise
                continue
            if rows[-1]["other_cores"] < _NOISY_CORES:
                break
        row = min(rows, key=lambda row: float(row["other_cores"]))
        if cell.explain and server.name in OURS:
            explained = self.load_of(server, cell.workload, serving.port, cell, explain=True)
            explained = replace(explained, seconds=max(0.3, cell.seconds * _EXPLAIN_SHARE), warm_up=0.1)
            row["mean_rows"] = run_load(self.program, explained, core=self.cores.of_load()).mean_rows
        return {
            "round": number,
            "server": server.name,
            "workload": cell.workload.name,
            "pattern": cell.pattern,
            "in_flight": cell.in_flight,
            "share": cell.share,
            "offered": load.rate,
            **row,
        }

    def measured(self, serving: Running, load: Load) -> Row:
        """Return the results of one load on a started server."""
        snapshots: list[tuple[float, float, tuple[float, float], tuple[int, int]]] = []

        def snapshot() -> None:
            pids.extend(serving.pids())
            snapshots.append((time.monotonic(), cpu_seconds(pids), busy_seconds(), serving.batches()))

        pids: list[int] = []
        measured: Measured = run_load(self.program, load, snapshot, core=self.cores.of_load())
        if not snapshots:
            raise LoadError("it did not begin to measure")
        began, cpu, (busy, stolen), batches = snapshots[0]
        seconds = time.monotonic() - began
        used = cpu_seconds(pids) - cpu
        busy, stolen = (after - before for after, before in zip(busy_seconds(), (busy, stolen), strict=True))
        rows, runs = (after - before for after, before in zip(serving.batches(), batches, strict=True))
        row = asdict(measured)
        row.update(
            cpu_us_per_answer=round(1e6 * used / (measured.rate * seconds), 2),
            server_cores=round(used / seconds, 3),
            load_cores=round(measured.cpu_seconds / seconds, 3),
            other_cores=round(max(0.0, (busy - used - measured.cpu_seconds + stolen) / seconds), 3),
            memory_mib=round(memory_mib(pids), 1),
        )
        row["mean_rows"] = round(rows / runs, 2) if runs else measured.mean_rows
        return row

    def _capacity(self, server: Server, cell: Cell, number: int) -> float:
        """Return the highest rate of this server in a closed loop in this round."""
        rates = [
            row["rate"] for row in self.of(number, server.name, cell.workload.name) if row["pattern"] == UNARY
        ]
        if not rates:
            raise LoadError("its capacity is not known")
        return float(max(rates))

    def of(self, number: int, server: str, workload: str) -> Sequence[Row]:
        """Return the rows of a round."""
        wanted = (number, server, workload)
        return [row for row in self.rows if (row["round"], row["server"], row["workload"]) == wanted]

    def _raw(self, workload: Workload, row: Row) -> None:
        """Measure raw ONNX Runtime on the core of the idle server: first in the server's batch sizes,
        then in others.
        """
        own = round(row["mean_rows"])
        wanted = [own, *(rows for rows in RAW_ROWS if rows != own)] if own else RAW_ROWS
        words = ["-m", "serving.peers.raw", str(_RAW_SECONDS), *map(str, wanted)]
        done = subprocess.run(
            ["taskset", "-c", str(self.cores.server), sys.executable, *words],
            env={
                **os.environ,
                "PYTHONPATH": str(BENCHMARKS) + os.pathsep + os.environ.get("PYTHONPATH", ""),
                "SERVING_BENCH_MODEL": str(workload.path(self.cache)),
            },
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise VisitError(done.stderr.strip()[-500:])
        for line in done.stdout.splitlines():
            raw = {"round": row["round"], "server": RAW, "workload": workload.name, **json.loads(line)}
            self.rows.append(raw)
            print(
                f"{RAW:20s} {workload.name:11s} batches of {raw['rows']:3d}: {raw['rate']:9.0f}/s", flush=True
            )


def _await(serving: Running, ready: Callable[[], None]) -> None:
    until, reason = time.monotonic() + _START_SECONDS, ""
    while time.monotonic() < until:
        try:
            ready()
            return
        except Exception as error:
            # A client may raise anything while the server starts.
            reason = " ".join(str(error).split())[:300]
        if (status := serving.ended()) is not None:
            raise VisitError(f"it ended with status {status}: {serving.log()}")
        time.sleep(0.05)
    raise VisitError(f"no right answer after {_START_SECONDS} s ({reason}): {serving.log()}")


def _asked(cell: Cell) -> str:
    load = f"{cell.share:.0%} load" if cell.share else f"{cell.in_flight} in flight"
    return f"{cell.workload.name}, {cell.pattern}, {load}"


def _line(row: Row) -> str:
    load = f"{row['share']:.0%} load" if row["share"] else f"{row['in_flight']:3d} in flight"
    errors = f"  {row['errors']} errors: {row['last_message']}" if row["errors"] else ""
    lost = f"  {row['unanswered']} unanswered" if row["unanswered"] else ""
    return (
        f"{row['server'][:20]:20s} {row['workload']:11s} {row['pattern']:10s} {load:13s}: "
        f"{row['rate']:9.0f}/s  p50 {row['p50_ms']:8.3f}  p99 {row['p99_ms']:8.3f} ms  "
        f"{row['cpu_us_per_answer']:8.1f} us CPU  batch {row['mean_rows']:5.1f}  "
        f"load {row['load_cores']:4.2f}  others {row['other_cores']:4.2f}{errors}{lost}"
    )
