"""Child of the supervisor in tests: `engine` of `supervised.py`."""

from __future__ import annotations

import sys

from support.processes import supervised

supervised.engine(sys.argv[1:])
