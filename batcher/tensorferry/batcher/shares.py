"""Whose turn it is: deficit round robin over the rows of priority classes.

After M. Shreedhar and G. Varghese, "Efficient Fair Queueing Using Deficit Round Robin", 1995, with
rows for bytes. A round gives every class that has something queued its share of a full batch in
credit, and a class leads a batch as long as it has credit left, the highest class first. So
while all of them have requests queued, each gets rows in proportion to its weight, and none starves.
"""

from __future__ import annotations

from collections.abc import Sequence


class Shares:
    """The credit of each class in rows, the highest class first. Not thread-safe: its owner's lock guards it."""

    __slots__ = ("_round", "credits")

    def __init__(self, weights: Sequence[int], max_batch_size: int) -> None:
        # What a round gives: a full batch in all.
        self._round = [max_batch_size * weight / sum(weights) for weight in weights]
        self.credits = [0.0] * len(weights)

    def renew(self, queued: Sequence[int]) -> None:
        """Gives credit until a class with rows queued has some; `queued` are the rows of each class.

        A class with nothing queued loses its credit: what it did not use when it could have, it
        cannot claim later all at once.
        """
        if len(self.credits) == 1:
            return
        self._forfeit(queued)
        if not any(queued):
            return
        while not any(rows and credit >= 1 for rows, credit in zip(queued, self.credits, strict=True)):
            for level, rows in enumerate(queued):
                if rows:
                    self.credits[level] += self._round[level]

    def _forfeit(self, queued: Sequence[int]) -> None:
        for level, rows in enumerate(queued):
            if not rows:
                self.credits[level] = min(0.0, self.credits[level])

    def charge(self, rows: Sequence[int], lead: int, queued: Sequence[int]) -> None:
        """A batch left with so many rows of each class, and so many are still `queued`.

        Who led pays for all of its rows, the others for those that they had credit for: what they
        filled beyond was spare room.
        """
        for level, count in enumerate(rows):
            credit = self.credits[level]
            self.credits[level] -= count if level == lead else min(count, max(credit, 0.0))
        # At once: who comes back before the next batch has not been there all the time.
        self._forfeit(queued)
