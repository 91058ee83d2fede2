"""`make conformance`: every backend test of the `onnx` package through real servers, over the wire.

Each model is served as it is, and once more with its first axes made dynamic, so that the server
must find out whether they count rows that may share a batch. Prints the result of each case; the
exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from conformance.alone import excluded
from conformance.cases import Case, all_cases, opened
from conformance.wire import WINDOW, Verdict, model_name, serving

# Models that one process serves.
_MODELS = 300


def main() -> int:
    """Return 0 if every case that ONNX Runtime passes alone passes through the server, else 1."""
    parser = argparse.ArgumentParser(prog="conformance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--transport", choices=("lane", "threaded"), help="by default both, one after the other"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain this")
    arguments = parser.parse_args()
    cases = [case for case in all_cases() if arguments.only in model_name(case)]
    cases += [variant for variant in map(opened, cases) if variant is not None]
    chosen = []
    reasons: Counter[str] = Counter()
    for case in cases:
        reason = excluded(case)
        if reason is None:
            chosen.append(case)
        else:
            print(f"excluded  {model_name(case)}: {reason}")
            reasons[reason.partition(":")[0]] += 1
    failed = 0
    for transport in [arguments.transport] if arguments.transport else ["lane", "threaded"]:
        failed += _through(transport, chosen)
    print(f"\n{len(cases)} cases, {len(cases) - len(chosen)} of them excluded:")
    for reason, count in reasons.most_common():
        print(f"  {count:5} {reason}")
    return 1 if failed else 0


def _through(transport: str, cases: Sequence[Case]) -> int:
    """Run all cases on servers and print the results; return the number of failures."""
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(_parts(cases)):
            with serving(part, Path(folder) / str(number), *WINDOW, transport=transport) as asking:
                verdicts |= {model_name(case): asking.judge(case) for case in part}
    for name, verdict in verdicts.items():
        print(f"{transport:9} {name}: {verdict}")
    answered = [verdict for verdict in verdicts.values() if not verdict.wrong and not verdict.refused]
    refused = sum(bool(verdict.refused) for verdict in verdicts.values())
    failed = sum(bool(verdict.wrong) for verdict in verdicts.values())
    print(
        f"\n{transport}: {len(verdicts)} asked, {len(answered)} passed, {failed} failed, {refused} refused as they must be; "
        f"of those that passed, {sum(v.batched for v in answered)} are batched and {sum(v.batch_requests > 1 for v in answered)} "
        "shared a batch with other orders of their rows",
        flush=True,
    )
    return failed


def _parts(cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
    for at in range(0, len(cases), _MODELS):
        yield cases[at : at + _MODELS]


if __name__ == "__main__":
    sys.exit(main())
