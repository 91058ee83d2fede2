"""When groups are sent, and which calls they have."""

from __future__ import annotations

from tensorferry.client.coalescing.forms import Form
from tensorferry.client.coalescing.gathering import Gathering, Group

FORM, OTHER = Form("a", 1, 10, 8), Form("b", 1, 10, 8)


class Rig:
    """A gathering with calls that are named by letters."""

    def __init__(self, max_bytes: int = 1000) -> None:
        self.gathering: Gathering[str] = Gathering(max_bytes, max_wait=1.0)
        self.in_flight: list[Group[str]] = []

    def add(self, names: str, form: Form = FORM, deadline: float | None = None, now: float = 0.0) -> None:
        for name in names:
            self.gathering.add(form, name, deadline, now)

    def take(self, now: float = 0.0) -> list[str]:
        groups = self.gathering.take(now)
        self.in_flight += groups
        return ["".join(group.calls) for group in groups]

    def end(self, *, answered: bool = True) -> None:
        """End the oldest message in flight."""
        self.gathering.ended(self.in_flight.pop(0), answered=answered)

    def send(self, names: str, now: float = 0.0) -> list[str]:
        self.add(names, now=now)
        return self.take(now)


def test_a_lone_call_is_sent_at_once() -> None:
    rig = Rig()
    assert rig.send("a") == ["a"]
    rig.end()
    assert rig.send("b") == ["b"]


def test_calls_gather_while_a_message_is_in_flight() -> None:
    rig = Rig()
    assert rig.send("a") == ["a"]
    for name in "bcd":
        assert rig.send(name) == []
    rig.end()
    assert rig.take() == ["bcd"]
    assert rig.take() == []


def test_calls_that_come_before_the_group_is_taken_belong_to_it() -> None:
    rig = Rig()
    rig.send("a")
    rig.send("b")
    rig.end()
    assert rig.send("c") == ["bc"]


def test_calls_wait_no_longer_than_the_longest_wait() -> None:
    rig = Rig()
    rig.send("a")
    rig.send("b", now=0.5)
    rig.send("c", now=1.0)
    assert rig.gathering.next_due() == 1.5
    assert rig.take(1.4) == []
    assert rig.take(1.5) == ["bc"]
    assert rig.gathering.next_due() is None


def test_the_end_of_any_message_releases_the_next() -> None:
    rig = Rig()
    rig.send("a")
    rig.send("b")
    assert rig.take(2.0) == ["b"]
    assert rig.send("c", now=2.0) == []
    rig.end()
    assert rig.take(2.0) == ["c"]


def test_full_groups_are_sent_at_once() -> None:
    rig = Rig()
    rig.send("a")
    assert rig.send("bcdefgh") == []
    assert rig.send("ijk") == ["bcdefghi"]
    rig.end()
    assert rig.take() == ["jk"]


def test_a_call_that_does_not_fit_begins_another_group() -> None:
    rig = Rig()
    rig.send("a")
    rig.send("bcdef")
    rig.add("g", Form("a", 4, 10, 8))
    assert rig.take() == ["bcdef"]
    rig.end()
    assert rig.take() == ["g"]


def test_bytes_bound_a_group() -> None:
    rig = Rig(max_bytes=25)
    rig.send("a")
    rig.send("bc")
    assert rig.send("d") == ["bc"]
    rig.add("e", Form("a", 1, 15, 8))
    assert rig.take() == ["de"]


def test_forms_do_not_mix_or_wait_for_each_other() -> None:
    rig = Rig()
    assert rig.send("a") == ["a"]
    rig.add("b", OTHER)
    assert rig.take() == ["b"]
    rig.add("c", OTHER)
    rig.add("d")
    rig.end()
    assert rig.take() == ["d"]
    rig.end()
    assert rig.take() == ["c"]


def test_deadlines_of_a_group_are_close_together() -> None:
    rig = Rig()
    rig.send("a")
    rig.add("b", deadline=10.0)
    rig.add("c", deadline=12.0)
    rig.add("d", deadline=12.5)
    (group,) = rig.gathering.take(0.0)
    assert (group.calls, group.latest) == (["b", "c"], 12.0)
    rig.add("e", deadline=10.4)
    (group,) = rig.gathering.take(0.0)
    assert (group.calls, group.latest) == (["d"], 12.5)


def test_after_a_failed_message_calls_are_sent_alone_and_then_in_growing_groups() -> None:
    rig = Rig()
    rig.send("a")
    rig.send("bc")
    rig.end()
    assert rig.take() == ["bc"]
    assert rig.send("d") == []
    rig.end(answered=False)
    assert rig.take() == ["d"]
    assert rig.send("ef") == ["e", "f"]
    rig.end()
    assert rig.send("ghi") == ["gh"]
    rig.end()
    assert rig.send("jklm") == ["ijkl"]


def test_a_form_that_was_idle_begins_without_that_bound() -> None:
    rig = Rig()
    rig.send("a")
    rig.send("bc")
    rig.end()
    assert rig.take() == ["bc"]
    rig.end(answered=False)
    assert rig.send("d") == ["d"]
    assert rig.send("efg") == []


def test_the_failure_of_a_lone_call_changes_nothing() -> None:
    rig = Rig()
    rig.send("a")
    rig.send("bc")
    rig.end(answered=False)
    assert rig.take() == ["bc"]


def test_forms_without_calls_are_forgotten() -> None:
    rig = Rig()
    for number in range(100):
        rig.add("a", Form(number, 1, 10, 8))
    assert len(rig.take()) == 100
    for _ in range(100):
        rig.end()
    assert not rig.gathering._states


def test_what_was_not_sent_can_be_dropped() -> None:
    rig = Rig()
    rig.send("a")
    rig.add("bcdefghij")
    assert ["".join(group.calls) for group in rig.gathering.drop()] == ["bcdefghi", "j"]
    assert rig.take(9.0) == []
    rig.end()
