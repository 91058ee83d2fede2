"""Child of the supervisor in tests: `front_end` of `supervised.py`."""

from __future__ import annotations

import sys

from support.processes import supervised

supervised.front_end(sys.argv[1:])
