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
class _FormState(Generic[Call]):
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
        self._states: dict[Hashable, _FormState[Call]] = {}
        self._full: list[Group[Call]] = []

    def add(self, form: Form, call: Call, deadline: float | None, now: float) -> Group[Call]:
        """Add a call to the open group of its form, and return the group."""
        state = self._states.get(form.key)
        if state is None:
            state = self._states[form.key] = _FormState()
        group = state.group
        if group is not None and not self._fits(group, form, deadline):
            self._close(state)
            group = None
        if group is None:
            group = state.group = Group(form, now + self.max_wait, earliest=deadline, latest=deadline)
            state.released = state.in_flight == 0
        group.calls.append(call)
        group.rows += form.rows
        group.nbytes += form.nbytes
        if deadline is not None:
            assert group.earliest is not None
            assert group.latest is not None
            group.earliest = min(group.earliest, deadline)
            group.latest = max(group.latest, deadline)
        if group.rows >= form.max_rows or group.nbytes >= self._max_bytes or len(group.calls) >= state.limit:
            self._close(state)
        return group

    def take(self, now: float) -> list[Group[Call]]:
        """Remove and return the groups to send now. Each counts as in flight until `ended`."""
        taken, self._full = self._full, []
        for state in self._states.values():
            group = state.group
            if group is not None and (state.released or group.due <= now):
                state.group = None
                state.in_flight += 1
                taken.append(group)
        return taken

    def ended(self, group: Group[Call], *, answered: bool) -> Group[Call] | None:
        """Record the end of a group's message; return the open group of its form, which can now be taken."""
        state = self._states[group.form.key]
        state.in_flight -= 1
        if answered:
            state.limit = min(_UNLIMITED, 2 * state.limit)
        elif len(group.calls) > 1:
            state.limit = 1
        if state.group is not None:
            state.released = True
        elif not state.in_flight:
            del self._states[group.form.key]
        return state.group

    def released(self) -> bool:
        """Return whether `take` would return a group that is not overdue."""
        return bool(self._full) or any(
            state.released and state.group is not None for state in self._states.values()
        )

    def next_due(self) -> float | None:
        """Return when the next open group is due; None if there is none."""
        return min(
            (state.group.due for state in self._states.values() if state.group is not None), default=None
        )

    def drop(self) -> list[Group[Call]]:
        """Remove and return all groups that were not taken."""
        dropped, self._full = self._full, []
        for state in self._states.values():
            if state.group is not None:
                dropped.append(state.group)
                state.group = None
        return dropped

    def _fits(self, group: Group[Call], form: Form, deadline: float | None) -> bool:
        if group.rows + form.rows > form.max_rows or group.nbytes + form.nbytes > self._max_bytes:
            return False
        if deadline is None or group.earliest is None or group.latest is None:
            return True
        spread = max(group.latest, deadline) - min(group.earliest, deadline)
        return spread <= _SPREAD * self.max_wait

    def _close(self, state: _FormState[Call]) -> None:
        assert state.group is not None
        self._full.append(state.group)
        state.group = None
        state.in_flight += 1
