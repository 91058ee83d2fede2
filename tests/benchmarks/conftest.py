"""Makes the simulation's scripts importable, as in a run of one of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "simulate"))
