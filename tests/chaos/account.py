"""Evaluation of the ledger: each call once, its outcome, and what must never be found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.caller import ENDLESS_SECONDS, GRACE_SECONDS, LOST
from chaos.content import AT_FAULT

_AT_FAULT = {mark.name for mark in AT_FAULT}
# Allowed status codes beside an answer; INTERNAL if the request itself is at fault.
_KNOWN = {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED", "NOT_FOUND", LOST}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answered call: when, how long after it was sent, in seconds, and its kind."""

    at: float
    took: float
    kind: str


@dataclass(slots=True)
class Account:
    """Evaluation of all ledgers. The sequences name calls, with what is wrong with them."""

    sent: int = 0
    states: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    crossed: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether no call was lost, doubled, crossed, or ended by an unexpected status."""
        return not (self.lost or self.doubled or self.crossed or self.unexplained)


def read(ledgers: Sequence[Path], killed: Collection[Path]) -> Account:
    """Read the ledgers; callers that were `killed` may have left calls open."""
    account = Account()
    for ledger in ledgers:
        _read_one(ledger, account, was_killed=ledger in killed)
    return account


def _read_one(ledger: Path, account: Account, *, was_killed: bool) -> None:
    open_calls: dict[str, tuple[str, float, str, str]] = {}
    ended: set[str] = set()
    for line in ledger.read_text().splitlines():
        event, tag, *rest = line.split(" ")
        if event == "S":
            deadline, at, kind, mark = rest
            account.sent += 1
            open_calls[tag] = (deadline, float(at), kind, mark)
            continue
        state, at = rest
        if tag in ended or tag not in open_calls:
            account.doubled.append(line)
            continue
        deadline, sent_at, kind, mark = open_calls.pop(tag)
        ended.add(tag)
        took = float(at) - sent_at
        account.states[kind, state if state in _KNOWN or state == "INTERNAL" else "OTHER"] += 1
        if state.startswith(("CROSSED", "WRONG")):
            account.crossed.append(line)
        elif state not in _KNOWN and not (state == "INTERNAL" and mark in _AT_FAULT):
            account.unexplained.append(f"{line} ({kind}, {mark})")
        if took > (ENDLESS_SECONDS if deadline == "-" else float(deadline) + GRACE_SECONDS):
            account.lost.append(f"{line}: only after {took:.1f} s, its deadline {deadline}")
        if state == "OK":
            account.answers.append(Answer(float(at), took, kind))
    if was_killed:
        account.left += len(open_calls)
    else:
        account.lost += [f"{tag} never ended: {what}" for tag, what in open_calls.items()]
