"""One target under atheris, in its own process: `python -m fuzz.guided NAME --runs N ...`.

Writes its figures as JSON; ends with 0 only without a finding. The input of a finding is written to
the folder given with --findings.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import atheris

with atheris.instrument_imports(include=["tensorferry"], enable_loader_override=False):
    from fuzz import mutate
    from fuzz.catalogue import KEPT, TARGETS
    from fuzz.target import BOUND_SECONDS, Errors, FindingError, Target

# Allowed growth of Python objects in the second half of a run. Caches of templates and shapes are
# bounded, and full long before.
_MOST_BLOCKS = 60_000
_MOST_MEMORY_MB = 2048
_LONGEST_INPUT = 64 * 1024


class Session:
    """Counts the outcomes of inputs, and ends the process after enough of them."""

    def __init__(self, target: Target, runs: int, seconds: float, figures: Path) -> None:
        self._target = target
        self._runs = runs
        self._until = time.monotonic() + seconds
        self._began = time.monotonic()
        self._figures = figures
        self._outcomes: Counter[str] = Counter()
        self._tried = 0
        self._blocks = 0
        self._errors = Errors()
        logging.getLogger("tensorferry").addHandler(self._errors)

    def one(self, data: bytes) -> None:
        """Run one input for atheris; raise for a finding."""
        self._tried += 1
        try:
            self._outcomes[self._target.run(data)] += 1
            self._look()
        except BaseException as error:
            self._write(finding=f"{type(error).__name__}: {error}")
            raise

    def _look(self) -> None:
        if not self._tried & 1023:
            self._errors.check()
            # Whatever ends the process, the figures say how far it came.
            self._write()
            if self._tried >= self._runs or time.monotonic() > self._until:
                self._end()
            if not self._blocks and (
                self._tried >= self._runs // 2
                or time.monotonic() - self._began > (self._until - self._began) / 2
            ):
                self._blocks = _blocks()

    def _end(self) -> NoReturn:
        self._target.check()
        grown = _blocks() - self._blocks if self._blocks else 0
        if grown > _MOST_BLOCKS:
            raise FindingError(f"{grown} more objects than half-way: memory grows with the inputs")
        self._target.close()
        self._errors.check()
        self._write(grown_blocks=grown)
        sys.stdout.flush()
        # libFuzzer has no other way to be stopped.
        os._exit(0)

    def _write(self, **more: Any) -> None:
        figures = {
            "tried": self._tried,
            "outcomes": dict(self._outcomes),
            "seconds": time.monotonic() - self._began,
            "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            **more,
        }
        self._figures.write_text(json.dumps(figures))


def _blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--runs", type=int, default=1 << 62)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--corpus", type=Path, required=True, help="inputs that reach something new are added here"
    )
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--findings", type=Path, required=True)
    given = parser.parse_args()
    logging.getLogger("tensorferry").propagate = False
    with tempfile.TemporaryDirectory() as scratch:
        target = TARGETS[given.target](Path(scratch))
        seeds = [bytes(seed) for seed in target.seeds()]
        for number, seed in enumerate(seeds):
            (given.corpus / f"seed-{number}").write_bytes(seed)

        def mutated(data: bytes, most: int, seed: int) -> bytes:
            # Fields are changed seldom: libFuzzer's own changes of bytes are many times
            # as fast.
            if seed % 4 == 0:
                random = Random(seed)
                changed = mutate.with_fields_changed(random, target, data, random.choice(seeds))
                if changed is not None and len(changed) <= most:
                    return changed
            made: Any = atheris.Mutate(data, most)
            return bytes(made)

        options = [
            f"-seed={given.seed}",
            f"-max_len={_LONGEST_INPUT}",
            f"-timeout={BOUND_SECONDS:g}",
            f"-rss_limit_mb={_MOST_MEMORY_MB}",
            f"-artifact_prefix={given.findings}/{given.target}-",
            "-print_final_stats=0",
            "-verbosity=0",
            str(given.corpus),
            *([str(KEPT / given.target)] if (KEPT / given.target).is_dir() else []),
        ]
        session = Session(target, given.runs, given.seconds, given.figures)
        atheris.Setup([sys.argv[0], *options], session.one, custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
