"""Sharing of rows between priority classes: deficit round robin, or strict priority.

After M. Shreedhar and G. Varghese, "Efficient Fair Queueing Using Deficit Round Robin", 1995, with rows for bytes. A round
gives each class with queued requests its share of a full batch as credit. A class leads batches while it has credit, the
highest class first, and a batch is shared by credit, with as many rounds as it needs. So while all classes have requests
queued, each gets rows in proportion to its weight, and none starves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class StrictPriority:
    """Strict priority: each class before all lower ones, which may starve. Guarded by the queue's lock."""

    def __init__(self, classes: int) -> None:
        # Every class always has credit, so that the rank decides.
        self.credits = [math.inf] * classes

    def replenish(self, queued: Sequence[int]) -> None:
        """Do nothing: credit is unlimited."""

    def allocate(self, available: Sequence[int], queued: Sequence[int], room: int) -> list[int]:
        """Return the rows of each class in a batch, the highest class first."""
        rows = []
        for waiting in available:
            rows.append(min(waiting, room))
            room -= rows[-1]
        return rows

    def charge(self, rows: Sequence[int], leading_class: int, queued: Sequence[int]) -> None:
        """Do nothing: credit is unlimited."""


class DeficitRoundRobin:
    """Deficit round robin: credit of each class in rows, the highest class first. Guarded by the queue's lock."""

    def __init__(self, weights: Sequence[int], max_batch_size: int) -> None:
        # The credit that a round gives each class: a full batch in all.
        self._round = [max_batch_size * weight / sum(weights) for weight in weights]
        # Upper bound of credit: the rows of each class while the least weight gets a full batch. A class that waits for a
        # window cannot use its credit, and saves no more than this.
        self._most = [max_batch_size * weight / min(weights) for weight in weights]
        self.credits = [0.0] * len(weights)

    def replenish(self, queued: Sequence[int]) -> None:
        """Give credit until a class with queued rows has some; `queued` are the rows of each class.

        A class with nothing queued loses its credit, so that it cannot claim unused credit all at once later.
        """
        self._forfeit(queued)
        waiting = [rank for rank, rows in enumerate(queued) if rows]
        while waiting and all(self.credits[rank] < 1 for rank in waiting):
            self._give(waiting, waiting, [1] * len(queued))

    def _forfeit(self, queued: Sequence[int]) -> None:
        for rank, rows in enumerate(queued):
            if not rows:
                self.credits[rank] = min(0.0, self.credits[rank])

    def _give(self, waiting: Sequence[int], wanting: Sequence[int], wanted: Sequence[int]) -> None:
        """Give rounds to the waiting classes until a wanting class has about the credit that it wants."""
        # Computed, not looped: with very different weights there may be millions of rounds.
        rounds = min(math.ceil((wanted[rank] - self.credits[rank]) / self._round[rank]) for rank in wanting)
        for rank in waiting:
            credit = self.credits[rank]
            more = credit + max(1, rounds) * self._round[rank]
            self.credits[rank] = max(credit, min(more, self._most[rank]))

    def allocate(self, available: Sequence[int], queued: Sequence[int], room: int) -> list[int]:
        """Return the rows of each class in a batch of `room` rows; `available` rows of each may go into it."""
        if len(self.credits) == 1:
            return [min(available[0], room)]
        rows = [0] * len(available)
        while True:
            for rank, waiting in enumerate(available):
                more = min(math.ceil(self.credits[rank]), waiting) - rows[rank]
                rows[rank] += max(0, min(more, room - sum(rows)))
            if sum(rows) >= min(room, sum(available)):
                return rows
            wanting = [rank for rank, waiting in enumerate(available) if rows[rank] < waiting]
            self._give([rank for rank, waiting in enumerate(queued) if waiting], wanting, rows)

    def charge(self, rows: Sequence[int], leading_class: int, queued: Sequence[int]) -> None:
        """Charge a closed batch with these rows of each class; `queued` rows remain.

        The leading class pays for all of its rows. Others pay for the rows that they had credit for, because the rest
        filled spare room.
        """
        for rank, count in enumerate(rows):
            credit = math.ceil(max(self.credits[rank], 0.0))
            self.credits[rank] -= count if rank == leading_class else min(count, credit)
        # Now, because a class that returns before the next batch has not been queued all the time.
        self._forfeit(queued)
