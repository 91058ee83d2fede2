"""`make crashes`: a real server of two processes, which are killed under load."""

from __future__ import annotations

import argparse
import datetime
import platform
import resource
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from crashes.crashes import PROCESSES, Crashes, run
from crashes.poison import AT_ONCE, MOST_ENDS


def main() -> int:
    """Return 0 if everything that must hold does."""
    parser = argparse.ArgumentParser(prog="crashes", description=__doc__)
    parser.add_argument(
        "--kills", type=int, default=100, help="of processes; half as many rounds of requests that abort them"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("lane", "threaded"), default="lane")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    options = parser.parse_args()
    # An aborted process would write its memory to a file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="crashes-") as scratch:
        found = run(options.kills, options.seed, options.transport, Path(scratch) / "server")
    if options.log is not None:
        options.log.write_text("".join(found.log))
    held = verdicts(found)
    print(markdown(found, held, f"make crashes KILLS={options.kills}", options.transport))
    for what in found.all_wrong[:100]:
        print(what, file=sys.stderr)
    return 0 if all(held.values()) else 1


def verdicts(found: Crashes) -> dict[str, bool]:
    """Return what must hold, and whether it does."""
    process, _, _ = found.phases
    return {
        "each request ended once, with its own answer or UNAVAILABLE": {state for _, state in found.states}
        <= {"OK", "UNAVAILABLE"}
        and found.sent.total() == found.states.total(),
        "a process's death: only calls of its own connections failed": not process.wrong
        and not process.connections_lost,
        f"of {AT_ONCE} requests in a batch that aborts a process, one is refused by all, and all others get answers; at most "
        f"{MOST_ENDS} processes end": found.poison.right,
        "nothing left behind, nothing else wrong": not found.all_wrong,
    }


def markdown(found: Crashes, held: dict[str, bool], command: str, transport: str) -> str:
    """Return the findings as tables."""
    software = f"Python {platform.python_version()}, grpcio {version('grpcio')}, onnxruntime {version('onnxruntime')}"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    poison = found.poison
    lines = [
        f"{today}, `{command}`, {PROCESSES} processes, {transport}: {software}.",
        "",
        "| what must hold | holds |",
        "|---|---|",
        *(f"| {what} | {'yes' if holds else 'NO'} |" for what, holds in held.items()),
        "",
        "| killed | times | another process, s | every client answered, s | requests that got UNAVAILABLE |",
        "|---|---|---|---|---|",
        *(
            f"| {each.name} | {each.kills} | {_times(each.replaced)} | {_times(each.answered)} | {each.failed['UNAVAILABLE']} |"
            for each in found.phases
        ),
        "",
        f"{found.sent['unary']} unary requests and {found.sent['stream']} in streams. {len(poison.ends)} requests that abort "
        f"ended {sum(poison.ends)} processes, and were refused after {_times(poison.refused)} s. Times: median, then longest.",
    ]
    return "\n".join(lines)


def _times(values: Sequence[float]) -> str:
    return f"{sorted(values)[len(values) // 2]:.2f}, {max(values):.2f}" if values else ""


if __name__ == "__main__":
    sys.exit(main())
