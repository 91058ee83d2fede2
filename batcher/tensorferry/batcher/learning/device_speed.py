"""Pace: by how much batches take longer on one device than on another.

A bucket's batch times are those of the first device; another's are so many times as long.
"""

from __future__ import annotations

import math
import statistics

# Of so many first batches the median is believed, the lower of two: what is slow once may be an accident.
_FIRST = 5
# From so many on it is a measure to learn from.
_KNOWN = 3
_WEIGHT = 1 / 8
# One that is off by more than this factor counts as if it were by just that ...
_CLIP = math.log(1.3)
# ... until so many in a row were, on the same side: then what was known is forgotten.
_SIDE_RUN = 8
# What differs by less is taken for equal: nothing is gained by telling such devices apart.
_EQUAL = math.log(1.15)


class Pace:
    """Learns how many times as long as on the first device batches take on another. Guarded by the queue's lock."""

    __slots__ = ("_first", "_log", "_side_run", "value")

    def __init__(self) -> None:
        self._first: list[float] = []
        self._log = 0.0
        self._side_run = 0
        # 1 as long as nothing is known, and where devices are about equally fast.
        self.value = 1.0

    @property
    def known(self) -> bool:
        """Whether enough batches were seen to tell from others' times what the first device's are."""
        return len(self._first) >= _KNOWN

    def observe(self, ratio: float) -> None:
        """A batch took so many times as long as it would on the first device."""
        off = math.log(max(ratio, 1e-9))
        if len(self._first) < _FIRST:
            self._first.append(off)
            self._log = statistics.median_low(self._first)
        else:
            off -= self._log
            if abs(off) > _CLIP:
                side = 1 if off > 0 else -1
                self._side_run = self._side_run + side if self._side_run * side > 0 else side
                off = math.copysign(_CLIP, off)
            else:
                self._side_run = 0
            self._log += _WEIGHT * off
            if abs(self._side_run) >= _SIDE_RUN:
                # It is another device now, so to speak. Until it is known this is the best guess.
                self._first.clear()
                self._side_run = 0
        self.value = math.exp(self._log) if abs(self._log) > _EQUAL else 1.0
