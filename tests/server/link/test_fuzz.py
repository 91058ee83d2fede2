"""Short form of `make fuzz-link`, the same in every run."""

from __future__ import annotations

from support.server.link_fuzz import Fuzzer


def test_nothing_in_the_memory_harms_a_side() -> None:
    fuzzer = Fuzzer(1)
    fuzzer.run(20_000)
    outcomes = fuzzer.outcomes
    assert outcomes["engine: submitted"] > 4_000
    assert outcomes["engine: large response"] > 1_000
    assert outcomes["front-end: received"] > 1_000
    assert min(outcomes.values()) > 20, outcomes
