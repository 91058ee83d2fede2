"""`make conformance`: every backend test of the `onnx` package through real servers, over the wire.

Each model is served as it is, and once more with its first axes left open, so that the server has to
find out whether they count rows that may share a batch. Prints each case with what came of it, ends
with a count, and with 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from conformance.alone import excluded
from conformance.cases import Case, all_cases, opened
from conformance.wire import Verdict, model_name, serving

# Models that one process serves.
_MODELS = 300
# Long enough that requests which are sent together share a batch, where they may.
_WINDOW = ("--max-queue-delay-ms", "5")


def main() -> int:
    """0 when every case that ONNX Runtime passes by itself passes through the server."""
    parser = argparse.ArgumentParser(prog="conformance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transport", choices=("lane", "threaded"), default="lane")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    arguments = parser.parse_args()
    started = time.monotonic()
    cases = [case for case in all_cases() if arguments.only in model_name(case)]
    cases += [variant for variant in map(opened, cases) if variant is not None]
    left_out: dict[str, str] = {}
    for case in cases:
        reason = excluded(case)
        if reason is not None:
            left_out[model_name(case)] = reason
    chosen = [case for case in cases if model_name(case) not in left_out]
    print(f"{len(cases)} cases, {len(left_out)} excluded, after {time.monotonic() - started:.0f} s", flush=True)
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(_parts(chosen)):
            begun = time.monotonic()
            with serving(part, Path(folder) / str(number), *_WINDOW, transport=arguments.transport) as asking:
                loaded = time.monotonic()
                verdicts |= {model_name(case): asking.judge(case) for case in part}
            print(f"{len(part)} models: loaded in {loaded-begun:.1f} s, asked in {time.monotonic()-loaded:.1f} s", flush=True)
    for name, v in verdicts.items():
        if v.wrong: print("FAILED", name, v.wrong, v.batching)
    print(Counter((name.endswith('.open'), v.batched, v.company, not v.wrong) for name, v in verdicts.items()))
    return 0


def _parts(cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
    for at in range(0, len(cases), _MODELS):
        yield cases[at : at + _MODELS]


if __name__ == "__main__":
    sys.exit(main())
