"""The limits on bytes of responses that clients have not read: per connection, and in all."""

from __future__ import annotations

from functools import partial

import pytest

from tensorferry.server.errors import UnreadResponsesError
from tensorferry.server.transport.unread_responses import ResponseAccount, UnreadResponses

MOST = 1600
OF_CONNECTION = 400


class World:
    """A limit, a clock that the test sets, and the accounts that were given up."""

    def __init__(self) -> None:
        self.now = 0.0
        self.unread = UnreadResponses(MOST, lambda: self.now)
        self.stale_error: list[str] = []

    def account(self, connection: str, name: str = "") -> Account:
        def give_up(error: UnreadResponsesError) -> None:
            assert error.retry_after > 0
            self.stale_error.append(name)

        return Account(self.unread, ResponseAccount(connection, give_up))


class Account:
    """The responses of one call."""

    def __init__(self, unread: UnreadResponses, account: ResponseAccount) -> None:
        self.add = partial(unread.add, account)
        self.remove = partial(unread.remove, account)
        self.close = partial(unread.close, account)


@pytest.fixture
def world() -> World:
    return World()


def test_a_connection_holds_a_quarter(world: World) -> None:
    first, second = world.account("a"), world.account("a")
    assert first.add(300) is None
    assert second.add(100) is None
    assert not world.unread.refuses_some
    error = second.add(1)
    assert "400 bytes of answers to this connection wait to be read, of at most 400" in str(error)
    assert "--max-unsent-bytes" in str(error)
    assert world.unread.refuses_some
    assert world.unread.refusal("a") is not None
    assert world.unread.refusal("b") is None
    assert world.account("b").add(400) is None
    first.remove(300)
    assert not world.unread.refuses_some
    second.close()
    assert world.unread.refusal("a") is None
    assert world.unread.total == 400


def test_all_connections_together_hold_the_limit(world: World) -> None:
    for name in "abcd":
        assert world.account(name).add(OF_CONNECTION) is None
    other = world.account("e")
    assert "1600 bytes of answers to all clients wait to be read, of at most 1600" in str(other.add(1))
    assert world.unread.refusal("e") is not None
    assert world.unread.total == MOST


def test_the_only_response_always_fits(world: World) -> None:
    account = world.account("a")
    assert account.add(10 * MOST) is None
    assert world.account("a").add(1) is not None
    account.remove(10 * MOST)
    assert not world.unread.refuses_some
    assert world.account("a").add(10 * MOST) is None


def test_bytes_are_subtracted_once(world: World) -> None:
    account = world.account("a")
    account.add(100)
    account.remove(60)
    account.close()
    account.close()
    account.remove(40)
    assert account.add(50) is None, "a call that is over counts nothing more"
    assert world.unread.total == 0
    assert world.unread._connections == {}
    assert world.unread._accounts == {}


def test_stale_responses_make_room_for_others(world: World) -> None:
    """Calls whose client has read nothing for ten seconds are given up, oldest first, and no more than needed."""
    for number, name in enumerate("abcd"):
        world.now = number
        world.account(name, name).add(OF_CONNECTION)
    world.now = 9.0
    assert world.account("e").add(100) is not None, "nothing is stale yet"
    world.now = 12.5
    assert world.account("e").add(100) is None
    assert world.stale_error == ["a"]
    assert world.unread.total == 3 * OF_CONNECTION + 100


def test_a_full_connection_gives_up_only_its_own_calls(world: World) -> None:
    world.account("a", "a").add(OF_CONNECTION)
    world.account("b", "b").add(OF_CONNECTION)
    world.now = 20.0
    assert world.unread.refusal("b") is None, "none of its answers was refused"
    assert world.account("b").add(1) is None
    assert world.stale_error == ["b"]


def test_a_client_that_reads_is_not_stale(world: World) -> None:
    reads, stalls = world.account("a", "reads"), world.account("a", "stalls")
    reads.add(100)
    reads.add(100)
    stalls.add(200)
    world.now = 9.0
    reads.remove(100)
    world.now = 11.0
    assert world.account("a").add(300) is None
    assert world.stale_error == ["stalls"]


def test_a_stream_reads_less_than_its_connection_may_hold() -> None:
    unread = UnreadResponses(MOST)
    assert unread.connection_limit == OF_CONNECTION
    assert unread.stream_limit == 100
