"""Whose turn it is: deficit round robin over the rows of priority classes.

After M. Shreedhar and G. Varghese, "Efficient Fair Queueing Using Deficit Round Robin", 1995, with
rows for bytes. A round gives every class that has something queued its share of a full batch in
credit. A class leads a batch as long as it has credit left, the highest class first, and a batch
is shared by credit, with as many rounds as it needs. So while all of them have requests queued,
each gets rows in proportion to its weight, and none starves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Ranks:
    """Each class before all lower ones, which starve while it has enough queued. As `Shares`, without weights."""

    __slots__ = ("credits",)

    def __init__(self, classes: int) -> None:
        # Everyone has credit at any time: the rank decides.
        self.credits = [math.inf] * classes

    def renew(self, queued: Sequence[int]) -> None:
        """Nothing is kept that would have to be."""

    def allot(self, riding: Sequence[int], queued: Sequence[int], room: int) -> list[int]:
        """As many rows as there is room for, of the highest class first."""
        rows = []
        for waiting in riding:
            rows.append(min(waiting, room))
            room -= rows[-1]
        return rows

    def charge(self, rows: Sequence[int], lead: int, queued: Sequence[int]) -> None:
        """Nobody pays."""


class Shares:
    """The credit of each class in rows, the highest class first. Not thread-safe: its owner's lock guards it."""

    __slots__ = ("_most", "_round", "credits")

    def __init__(self, weights: Sequence[int], max_batch_size: int) -> None:
        # What a round gives: a full batch in all.
        self._round = [max_batch_size * weight / sum(weights) for weight in weights]
        # What each gets while the one with the least weight gets a full batch. Who waits for a
        # window cannot use its credit, and saves no more than that.
        self._most = [max_batch_size * weight / min(weights) for weight in weights]
        self.credits = [0.0] * len(weights)

    def renew(self, queued: Sequence[int]) -> None:
        """Gives credit until a class with rows queued has some; `queued` are the rows of each class.

        A class with nothing queued loses its credit: what it did not use when it could have, it
        cannot claim later all at once.
        """
        if len(self.credits) == 1:
            return
        self._forfeit(queued)
        waiting = [rank for rank, rows in enumerate(queued) if rows]
        while waiting and all(self.credits[rank] < 1 for rank in waiting):
            self._give(waiting, waiting, [1] * len(queued))

    def _forfeit(self, queued: Sequence[int]) -> None:
        for rank, rows in enumerate(queued):
            if not rows:
                self.credits[rank] = min(0.0, self.credits[rank])

    def _give(self, waiting: Sequence[int], wanting: Sequence[int], wanted: Sequence[int]) -> None:
        """Gives rounds to those that wait, until one of those that want has what it wants or nearly."""
        # At once: with weights far apart these may be millions.
        rounds = min(math.ceil((wanted[rank] - self.credits[rank]) / self._round[rank]) for rank in wanting)
        for rank in waiting:
            credit = self.credits[rank]
            more = credit + max(1, rounds) * self._round[rank]
            self.credits[rank] = max(credit, min(more, self._most[rank]))

    def allot(self, riding: Sequence[int], queued: Sequence[int], room: int) -> list[int]:
        """The rows of each class in a batch with so much room, when so many could be `riding` of those queued."""
        if len(self.credits) == 1:
            return [min(riding[0], room)]
        rows = [0] * len(riding)
        while True:
            for rank, waiting in enumerate(riding):
                more = min(math.ceil(self.credits[rank]), waiting) - rows[rank]
                rows[rank] += max(0, min(more, room - sum(rows)))
            if sum(rows) >= min(room, sum(riding)):
                return rows
            wanting = [rank for rank, waiting in enumerate(riding) if rows[rank] < waiting]
            self._give([rank for rank, waiting in enumerate(queued) if waiting], wanting, rows)

    def charge(self, rows: Sequence[int], lead: int, queued: Sequence[int]) -> None:
        """A batch left with so many rows of each class, and so many are still `queued`.

        Who led pays for all of its rows, the others for those that they had credit for: what they
        filled beyond was spare room.
        """
        if len(rows) == 1:
            # Nobody shares with it.
            return
        for rank, count in enumerate(rows):
            credit = math.ceil(max(self.credits[rank], 0.0))
            self.credits[rank] -= count if rank == lead else min(count, credit)
        # At once: who comes back before the next batch has not been there all the time.
        self._forfeit(queued)
