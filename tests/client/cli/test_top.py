"""`tensorferry top`: figures from two samples, their display, and error messages."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from client.calls import Output
from support.remote.web_server import Response, WebServer, web_server

from tensorferry.client.cli import top
from tensorferry.client.cli.top_view import StatusSamples, lines_of, percentile

PATIENCE = 30.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the site longer than the command does, because the machine may be busy."""
    monkeypatch.setattr(top.read, "__defaults__", (PATIENCE,))


def batch(number: int, **changes: Any) -> dict[str, Any]:
    """A batch closed at 10.0: waits of at most 2 ms, 1 ms on the device, done after 4 ms."""
    return {
        "number": number, "instance": 0, "requests": 2, "rows": 4, "reason": "idle", "again": False, "error": "",
        "predicted_seconds": 0.003, "padded_length": None, "closed": 10.0, "join_started": 10.0, "ready": 10.001,
        "started": 10.001, "ended": 10.002, "answered": 10.003, "done": 10.004,
        "members": [
            {"id": "a", "rows": 3, "priority": 1, "waited_seconds": 0.002, "answered": True},
            {"id": "", "rows": 1, "priority": 1, "waited_seconds": 0.001, "answered": True},
        ],
        **changes,
    }  # fmt: skip


def status(now: float = 0.0, answered: int = 0, **changes: Any) -> dict[str, Any]:
    """Status of a server whose model has answered `answered` requests, each in 1 to 2 ms, in batches of 2 requests and 4 rows."""
    outcomes = ("failed", "cancelled", "expired", "shed", "abandoned", "refused", "retried")
    model = {
        "name": "digits", "version": "1", "state": "READY", "reason": "", "batching": "batches of up to 8 rows (proved)",
        "settings": {"devices": ["cpu"], "max_batch_size": 8},
        "requests": {"accepted": answered, "answered": answered, **dict.fromkeys(outcomes, 0)},
        "times": {"queue": [answered, 0, 0], "compute": [answered, 0, 0], "total": [0, answered, 0]},
        "batches": {
            "ran": answered // 2, "failed": 0, "rows": answered * 2, "compute_seconds": answered * 0.001, "full_rows": 4,
            "by_rows": {"4": answered // 4, "6": answered // 2 - answered // 4} if answered else {},
            "by_reason": {"idle": answered // 2} if answered else {},
            "row_seconds": {"1": 0.02, "4": 0.01, "8": 0.012} if answered else {},
        },
        "padding": {"positions": answered * 3, "added": answered},
        "queue": {"requests": 3, "rows": 5, "rows_by_priority": [5], "running": 2, "bytes": 7},
        "warnings": [],
        "last_batches": [batch(answered // 2)] if answered else [],
    }  # fmt: skip
    server = {
        "version": "0.1.0",
        "address": "127.0.0.1:8001",
        "transport": "lane",
        "uptime_seconds": 3700 + now,
    }
    return {
        "schema": 1, "server": server, "ready": True, "draining": False, "problems": [], "now_seconds": now,
        "bounds_seconds": [0.001, 0.002], "models": [model], **changes,
    }  # fmt: skip


def shown(*samples: dict[str, Any], width: int = 200, **options: Any) -> list[str]:
    kept = StatusSamples()
    for one in samples:
        kept.add(one)
    return lines_of(kept, width, **options)


def test_the_display() -> None:
    lines = shown(status(0.0), status(2.0, 400), blocks="#")
    assert [line.rstrip() for line in lines] == [
        "tensorferry 0.1.0 on 127.0.0.1:8001: ready, lane transport, up 1 h 1 min",
        "",
        "MODEL     STATE       ANSWERED/s  LOST/s      P50      P95      P99 QUEUE P50 ROWS/BATCH PADDING  QUEUED RUNNING  BUSY",
        "digits v1 ready              200     0.0    1.5ms   1.95ms   1.99ms     500us        4.0     25%       5       2   20%",
        "",
        "digits v1: batches of up to 8 rows (proved), on cpu",
        "  a full batch has 4 rows; time per row by rows: 1: 20ms, 4: 10ms, 8: 12ms",
        "  batch sizes                               why batches closed",
        "  4-7 rows ######################## 100%    idle ######################## 100%",
        "      BATCH  ROWS REQUESTS REASON      WAITED      RAN     TOOK PREDICTED  REQUESTS",
        "       #200     4        2 idle           2ms      1ms      4ms       3ms  a x3, -",
    ]


def in_stages(now: float, answered: int) -> dict[str, Any]:
    """Status of a server with a pipeline: a stage of two steps, and one that another model runs."""
    made = status(now, answered)
    (model,) = made["models"]
    seconds = {"queue": 0.001, "input": 0.0, "compute": 0.002, "output": 0.001}
    counts = {name: model[name] for name in ("requests", "batches", "queue")}
    times = {"answer_seconds": {part: answered * value for part, value in seconds.items()}}
    both, rank = "clean+split", {"name": "rank", "stage": "rank", "ran": None, "compute_seconds": None}
    ran = answered // 2
    steps = [
        {"name": name, "stage": both, "ran": ran, "compute_seconds": ran * mean}
        for name, mean in (("clean", 0.001), ("split", 0.002))
    ]
    model |= {"answer_seconds": {part: 2 * value for part, value in times["answer_seconds"].items()}}
    model["steps"] = [*steps, rank]
    model["stages"] = [{"name": both, "model": None, **counts, **times}, {"name": "rank", "model": "rank"}]
    return made


def test_the_stages_of_a_pipeline() -> None:
    lines = [line.rstrip() for line in shown(in_stages(0.0, 0), in_stages(2.0, 400))]
    start = lines.index("digits v1: batches of up to 8 rows (proved), on cpu")
    assert lines[start + 1 : start + 4] == [
        "  STAGE          QUEUE    BATCH SHARE ROWS/BATCH  QUEUED  STEPS",
        "  clean+split      1ms      3ms   50%        4.0       5  clean 1ms, split 2ms",
        "  rank        (a model of its own)                        rank -",
    ]


def rate(*samples: dict[str, Any]) -> str:
    return shown(*samples)[3].split()[3]


def test_rates_are_of_the_last_seconds_of_one_run_of_the_model() -> None:
    """Samples older than the period do not count, and none from before a restart or a reload."""
    assert rate(*(status(float(at), 1000 if at < 3 else 1000 + 10 * (at - 2)) for at in range(9))) == "10"
    restarted, later = status(101.0, 10), status(102.0, 40)
    for uptime, one in enumerate((restarted, later)):
        one["server"]["uptime_seconds"] = uptime + 1.0
    assert rate(status(100.0, 5000), restarted, later) == "30"
    assert rate(status(0.0, 5000), status(1.0, 10)) == "0"
    lines = shown(status(0.0), status(1.0))
    assert lines[3].split()[3:9] == ["0", "0.0", "-", "-", "-", "-"]
    assert any("none yet" in line for line in lines)


def test_warnings_and_unloaded_models() -> None:
    broken = status(ready=False, problems=["model m version 1 is UNAVAILABLE: gone"])
    broken["models"] = [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "gone"}]
    lines = shown(broken)
    assert "NOT READY" in lines[0]
    assert lines[1] == "! model m version 1 is UNAVAILABLE: gone"
    assert lines[-1].split() == ["m", "v1", "unavailable"]


def test_a_failed_batch_and_one_without_recorded_members() -> None:
    look = status(1.0, 10)
    look["models"][0]["last_batches"] = [
        batch(0, error="ValueError", done=None, predicted_seconds=None) | {"number": None},
        batch(7, members=None),
    ]
    lines = shown(look)
    assert lines[-2].split()[:4] == ["#7", "4", "2", "idle"]
    assert lines[-2].endswith("(not recorded: no viewer was active)")
    assert lines[-1].split()[0] == "failed"
    assert "ValueError" in lines[-1]


def test_unprintable_characters_do_not_reach_the_terminal() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\r\n\u202e"
    look = status(1.0, 10, problems=[hostile])
    look["models"][0] |= {"name": hostile, "batching": hostile, "warnings": [hostile]}
    look["models"][0]["last_batches"][0]["members"][0]["id"] = hostile
    look["models"][0]["last_batches"][0]["error"] = hostile
    assert all(line.isprintable() for line in shown(look))
    assert {len(line) for line in shown(look, width=40)} <= set(range(41))


def test_percentiles() -> None:
    bounds = [0.001, 0.002]
    assert percentile([0, 0, 0], bounds, 0.5) is None
    found = [percentile(counts, bounds, 0.5) for counts in ([4, 0, 0], [0, 2, 0], [0, 0, 5])]
    assert found == pytest.approx([0.0005, 0.0015, 0.002])
    assert percentile([1, 1, 0], bounds, 0.99) == pytest.approx(0.00198)


def test_addresses(capsys: Output) -> None:
    for given, url in (
        ("127.0.0.1:8002", "http://127.0.0.1:8002/status.json"),
        ("http://h:1/metrics", "http://h:1/status.json"),
        ("https://h", "https://h/status.json"),
        ("[::1]:8002", "http://[::1]:8002/status.json"),
    ):
        assert top.status_url(given) == url
    for given in ("", "nowhere", "h:port", "h:99999", "ftp://h:1", "file:///etc/passwd"):
        assert top.main([given]) == 1
        assert "give http://HOST:PORT or HOST:PORT" in capsys.readouterr().err


@pytest.fixture
def site() -> Iterator[WebServer]:
    with web_server(None) as site:
        site.respond = lambda request: answer(status(0.0))
        yield site


def answer(look: object) -> Response:
    return Response(json.dumps(look).encode())


def address_of(site: WebServer) -> str:
    return site.url.removeprefix("http://")


def test_one_report(site: WebServer, capsys: Output) -> None:
    look = status(0.0)
    look["models"].append({**look["models"][0], "name": "other"})
    site.respond = lambda request: answer(look)
    address = address_of(site)
    # Standard output is a pipe.
    for arguments in ([address, "--once"], [address], ["--target", address, "--once"]):
        assert top.main([*arguments, "--interval", "0.1", "--model", "digits"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert out.startswith("tensorferry 0.1.0 on 127.0.0.1:8001: ready")
        assert "digits v1" in out
        assert "other" not in out
        assert "" not in out
    assert top.main([address, "--once", "--model", "x"]) == 1
    assert "there is no model 'x'; there are: digits" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        top.main([address, "--target", address])
    assert "give one of them" in capsys.readouterr().err


def test_unusable_answers(site: WebServer, capsys: Output) -> None:
    address = address_of(site)
    for code, body, said in (
        (404, b"", "the server is not tensorferry, or an older version"),
        (403, b"", "answered 403"),
        (200, b"<html>", "give the metrics' port"),
        (200, b"[" * 100_000, "give the metrics' port"),
        (200, b"[]", "needs schema 1"),
        (200, b'{"schema": 2}', "needs schema 1"),
    ):
        site.respond = lambda request: Response(body, code)  # noqa: B023
        assert top.main([address, "--once"]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert said in err
    site.close()
    assert top.main([address]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"tensorferry top: no server answers at {site.url}/status.json (")
    assert "--metrics-port" in err


def test_the_port_of_grpc_gets_one_sentence(capsys: Output) -> None:
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert top.main(["--target", f"127.0.0.1:{port}", "--once"]) == 1
    out, err = capsys.readouterr()
    assert server.stop(0).wait(PATIENCE)
    assert out == ""
    assert err == (
        f"tensorferry top: http://127.0.0.1:{port}/status.json is a gRPC port: give the port of the metrics, which the "
        "server has with --metrics-port and names in its first line of output\n"
    )


def test_a_closed_pipe_ends_it_quietly() -> None:
    """`tensorferry --help | head` ends without an error."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "tensorferry.server", "top", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


class Terminal:
    """The command in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._own, other = pty.openpty()
        script = (
            # A process gets Ctrl-C only from its controlling terminal, and ignores it by default
            # if the tests run in the background.
            "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "signal.signal(signal.SIGINT, signal.default_int_handler); "
            # A busy machine may take longer to answer than the command waits.
            "from tensorferry.client.cli import top; read = top.read; "
            f"top.read = lambda url, timeout=0: read(url, {PATIENCE}); sys.exit(top.main({list(arguments)!r}))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            # Without the variables that override the size of the terminal.
            env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            | {"PYTHONIOENCODING": "utf-8"},
        )
        os.close(other)
        self.seen = ""

    def await_text(self, text: str) -> None:
        """Read until the text has been written since the last wait."""
        give_up = time.monotonic() + PATIENCE
        while text not in self.seen:
            ready, _, _ = select.select([self._own], [], [], max(0.0, give_up - time.monotonic()))
            assert ready, f"{text!r} did not come: {self.seen!r}"
            self.seen += os.read(self._own, 1 << 16).decode(errors="replace")
        self.seen = self.seen.split(text, 1)[1]

    def type(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.fixture
def terminal(site: WebServer) -> Iterator[Terminal]:
    terminal = Terminal(address_of(site), "--interval", "3600")
    yield terminal
    terminal.close()


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_keys_and_a_resize_redraw_and_a_lost_server_is_found_again(
    terminal: Terminal, site: WebServer, key: str
) -> None:
    """The terminal settings are restored at the end."""
    terminal.await_text("\x1b[?1049h")
    terminal.await_text("lane transport")
    terminal.resize(30, 24)
    terminal.await_text("tensorferry 0.1.0 on 127.0.0.1\x1b[K")
    terminal.resize(120, 2)
    terminal.await_text("lane transport, up 1 h 1 min\x1b[K")
    site.respond = lambda request: Response(status=503)
    terminal.type(" ")
    terminal.await_text("NO ANSWER for")
    site.respond = lambda request: answer(status(9.0, draining=True))
    terminal.type(" ")
    terminal.await_text("draining")
    terminal.type(key)
    terminal.await_text("\x1b[?1049l")
    assert terminal.process.wait(PATIENCE) == 0


def test_sigterm_restores_the_terminal(terminal: Terminal) -> None:
    terminal.await_text("lane transport")
    terminal.process.terminate()
    terminal.await_text("\x1b[?1049l")
    assert terminal.process.wait(PATIENCE) == 128 + signal.SIGTERM


@pytest.mark.parametrize("waits", ["urllib.request.urlopen", "time.sleep"])
def test_ctrl_c_before_the_status_is_shown_is_quiet(
    site: WebServer, capsys: Output, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"tensorferry.client.cli.top.{waits}", interrupt)
    assert top.main([address_of(site), "--once"]) == 130
    assert capsys.readouterr() == ("", "")
