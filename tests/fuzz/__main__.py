"""Fuzz all targets and print the results: `python -m fuzz --runs 1000000` or `--seconds 600`.

Each target runs in its own process, up to --jobs at once; the runs, or the seconds, are divided
among them. The exit status is 1 if there is a finding; its input is then in --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Shares of all inputs: more for what any client reaches, fewer for slow targets.
SHARES = {
    "infer": 12, "http": 12, "stream": 2, "tensors": 26, "memory": 16, "settings": 11, "config": 1, "files": 2, "repository": 6,
    "client": 22, "wire-lane": 1, "wire-threaded": 1,
}  # fmt: skip
_DEFAULT_RUNS = 1_000_000
# Exit status of libFuzzer after an input that took too long.
_TIMED_OUT = 70


@dataclass(slots=True)
class Result:
    """Output and exit status of a target's process."""

    name: str
    code: int
    figures: dict[str, Any]
    output: str
    outcomes: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = Counter(self.figures.get("outcomes", {}))

    @property
    def finding(self) -> str:
        """Return the finding, "" for none."""
        said = str(self.figures.get("finding", ""))
        if self.code == _TIMED_OUT:
            return said or "an input takes too long"
        if self.code < 0:
            return said or f"ended by {signal.Signals(-self.code).name}"
        return said or (f"exit {self.code}" if self.code else "")

    @property
    def row(self) -> tuple[str, ...]:
        tried, seconds = self.figures.get("tried", 0), self.figures.get("seconds", 0.0)
        finding = self.finding
        internal = "INTERNAL" in finding
        hang = self.code == _TIMED_OUT or "within" in finding or "took" in finding or "Timeout" in finding
        crash = bool(finding) and not internal and not hang
        return (
            self.name, f"{tried:,}", str(int(crash)), str(int(hang)), str(int(internal)),
            f"{tried / seconds:,.0f}" if seconds else "-", str(self.figures.get("memory_mb", "-")),
            ", ".join(f"{name} {count:,}" for name, count in self.outcomes.most_common()),
        )  # fmt: skip


def fuzz(name: str, folder: Path, runs: float, seconds: float, seed: int) -> Result:
    """Run one target in its own process."""
    figures = folder / f"{name}.json"
    figures.unlink(missing_ok=True)
    common = [
        "--runs", f"{runs:.0f}", "--seconds", f"{seconds:.0f}", "--seed", str(seed), "--figures",
        str(figures),
    ]  # fmt: skip
    if name.startswith("wire-"):
        command = ["-m", "fuzz.attackers.wire", "--transport", name.removeprefix("wire-"), *common]
    else:
        corpus = folder / name
        corpus.mkdir(exist_ok=True)
        command = ["-m", "fuzz.guided", name, *common, "--corpus", str(corpus), "--findings", str(folder)]
    done = subprocess.run([sys.executable, *command], text=True, capture_output=True, check=False)
    told = json.loads(figures.read_text()) if figures.exists() else {}
    result = Result(name, done.returncode, told, done.stdout + done.stderr)
    print(
        f"{name}: {told.get('tried', 0):,} inputs, {result.finding or 'nothing found'}",
        file=sys.stderr,
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, help=f"inputs in all ({_DEFAULT_RUNS:,} if no seconds are given)")
    parser.add_argument("--seconds", type=float, help="for how long, in all")
    parser.add_argument("--only", choices=sorted(SHARES), action="append")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="for the corpus and what is found")
    given = parser.parse_args()
    runs = given.runs or (_DEFAULT_RUNS if given.seconds is None else 1 << 50)
    shares = {name: share for name, share in SHARES.items() if not given.only or name in given.only}
    total = sum(shares.values())
    given.folder.mkdir(exist_ok=True)
    began = time.monotonic()
    # The slowest targets first.
    names = sorted(
        shares, key=lambda name: not name.startswith(("infer", "http", "wire", "stream", "config"))
    )
    with ThreadPoolExecutor(given.jobs) as pool:
        futures = [
            pool.submit(
                fuzz, name, given.folder, runs * shares[name] / total,
                given.seconds * given.jobs / len(names) if given.seconds is not None else 1e9, given.seed,
            )
            for name in names
        ]  # fmt: skip
        results = [future.result() for future in futures]
    print_table(results, time.monotonic() - began)
    for result in results:
        if result.finding:
            print(f"\n{result.name}: {result.finding}\n{result.output[-4000:]}")
    raise SystemExit(1 if any(result.finding for result in results) else 0)


def print_table(results: list[Result], seconds: float) -> None:
    """Print a row for each target, and one for all."""
    heads = ("target", "inputs", "crashes", "hangs", "INTERNAL", "inputs/s", "MB", "outcomes")
    rows = [
        heads,
        *(result.row for result in sorted(results, key=lambda result: list(SHARES).index(result.name))),
    ]
    tried = sum(result.figures.get("tried", 0) for result in results)
    sums = [str(sum(int(row[column]) for row in rows[1:])) for column in (2, 3, 4)]
    rows.append(("all", f"{tried:,}", *sums, f"{tried / seconds:,.0f}", "", f"in {seconds:.0f} s"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads) - 1)]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)),
        ]
        print("  ".join(cells), row[-1], sep="  ")


if __name__ == "__main__":
    main()
