"""Short form of `make fuzz`: kept inputs and mutated good ones, the same in every run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from fuzz import mutate
from fuzz.catalogue import KEPT, TARGETS
from fuzz.target import Errors, Target

# Inputs per target, a fraction of a second each.
MUTANTS = {"infer": 100, "stream": 60, "config": 30, "files": 60, "http": 150}
OTHERS = 300


@pytest.fixture(params=sorted(TARGETS))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    """A target that must leave nothing behind and log no error."""
    errors = Errors()
    log = logging.getLogger("tensorferry")
    log.addHandler(errors)
    made = TARGETS[request.param](tmp_path)
    try:
        yield made
        made.check()
        made.close()
        errors.check()
    finally:
        log.removeHandler(errors)


def test_every_target_has_kept_inputs() -> None:
    assert {path.name for path in KEPT.iterdir()} == TARGETS.keys()
    assert sum(path.stat().st_size for path in KEPT.glob("*/*")) < 200_000


def test_inputs_end_as_they_may(target: Target) -> None:
    seeds = target.seeds()
    inputs = [*seeds, *(path.read_bytes() for path in sorted((KEPT / target.name).iterdir()))]
    kept = len(inputs)
    random = Random(target.name)
    count = MUTANTS.get(target.name, OTHERS)
    inputs += [mutate.mutant(random, target, inputs[:kept]) for _ in range(count)]
    outcomes = Counter(target.run(data) for data in inputs)
    assert outcomes.total() == kept + count
    # Some inputs pass the first check.
    assert len(outcomes) > 1, outcomes
