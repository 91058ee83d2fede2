"""When calls are sent, and which of them together. Pure decisions: no I/O, no clock, no lock."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tensorferry.client.coalescing.forms import Form

Call = TypeVar("Call")

# Largest number of calls of one message. Only the rows and bytes bound it otherwise.
_UNLIMITED = 1 << 20
# Deadlines of the calls of one message differ by at most this many times the longest wait.
_SPREAD = 2


@dataclass(slots=True, eq=False)
class Group(Generic[Call]):
    """Calls of one message. `due` is when it is sent at the latest; `earliest` and `latest` are deadlines."""

    form: Form
    due: float
    calls: list[Call] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0
    earliest: float | None = None
    latest: float | None = None


@dataclass(slots=True, eq=False)
class _Line(Generic[Call]):
    """State of one form. `limit` bounds the calls of a message; `released`: the open group need not wait."""

    in_flight: int = 0
    group: Group[Call] | None = None
    released: bool = True
    limit: int = _UNLIMITED


class Gathering(Generic[Call]):
    """Groups of calls with the same form, open for more calls until they are taken.

    A group is taken at once while no message of its form is in flight. Otherwise it is taken when
    the next of them has ended, when it is full, or after `max_wait`.

    After a message of several calls failed, the next calls are sent alone, and each answer doubles
    how many calls a message may have. So a caller whose rows always fail costs the others little.

    Not thread-safe: the owner guards it.
    """

    def __init__(self, max_bytes: int, max_wait: float) -> None:
        self._max_bytes = max_bytes
        self.max_wait = max_wait
        self._lines: dict[Hashable, _Line[Call]] = {}
        self._full: list[Group[Call]] = []

    def add(self, form: Form, call: Call, deadline: float | None, now: float) -> Group[Call]:
        """Add a call to the open group of its form, and return the group."""
        line = self._lines.get(form.key)
        if line is None:
            line = self._lines[form.key] = _Line()
        group = line.group
        if group is not None and not self._fits(group, form, deadline):
            self._close(line)
            group = None
        if group is None:
            group = line.group = Group(form, now + self.max_wait, earliest=deadline, latest=deadline)
            line.released = line.in_flight == 0
        group.calls.append(call)
        group.rows += form.rows
        group.nbytes += form.nbytes
        if deadline is not None:
            assert group.earliest is not None
            assert group.latest is not None
            group.earliest = min(group.earliest, deadline)
            group.latest = max(group.latest, deadline)
        if group.rows >= form.max_rows or group.nbytes >= self._max_bytes or len(group.calls) >= line.limit:
            self._close(line)
        return group

    def take(self, now: float) -> list[Group[Call]]:
        """Remove and return the groups to send now. Each counts as in flight until `ended`."""
        taken, self._full = self._full, []
        for line in self._lines.values():
            group = line.group
            if group is not None and (line.released or group.due <= now):
                line.group = None
                line.in_flight += 1
                taken.append(group)
        return taken

    def ended(self, group: Group[Call], *, answered: bool) -> Group[Call] | None:
        """Record the end of a group's message; return the open group of its form, which can now be taken."""
        line = self._lines[group.form.key]
        line.in_flight -= 1
        if answered:
            line.limit = min(_UNLIMITED, 2 * line.limit)
        elif len(group.calls) > 1:
            line.limit = 1
        if line.group is not None:
            line.released = True
        elif not line.in_flight:
            del self._lines[group.form.key]
        return line.group

    def released(self) -> bool:
        """Return whether `take` would return a group that is not overdue."""
        return bool(self._full) or any(
            line.released and line.group is not None for line in self._lines.values()
        )

    def next_due(self) -> float | None:
        """Return when the next open group is due; None if there is none."""
        return min((line.group.due for line in self._lines.values() if line.group is not None), default=None)

    def drop(self) -> list[Group[Call]]:
        """Remove and return all groups that were not taken."""
        dropped, self._full = self._full, []
        for line in self._lines.values():
            if line.group is not None:
                dropped.append(line.group)
                line.group = None
        return dropped

    def _fits(self, group: Group[Call], form: Form, deadline: float | None) -> bool:
        if group.rows + form.rows > form.max_rows or group.nbytes + form.nbytes > self._max_bytes:
            return False
        if deadline is None or group.earliest is None or group.latest is None:
            return True
        spread = max(group.latest, deadline) - min(group.earliest, deadline)
        return spread <= _SPREAD * self.max_wait

    def _close(self, line: _Line[Call]) -> None:
        assert line.group is not None
        self._full.append(line.group)
        line.group = None
        line.in_flight += 1
