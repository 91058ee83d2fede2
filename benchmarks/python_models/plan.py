"""Plan of the plain functions: servers and loads, in order."""

from __future__ import annotations

from pathlib import Path

from serving.plan import UNARY, Cell, Visit
from serving.servers import BENTOML, LANE, LITSERVE, MOSEC, PYTRITON
from serving.workloads import Workload

PART = "functions"
_FOLDER = Path(__file__).with_name("functions")
_WIDTH = 64
FUNCTIONS = (
    Workload("tanh", "tanh", _WIDTH, "`tanh(x @ w)` of 64 floats in numpy", _FOLDER / "tanh.py"),
    Workload("empty", "empty", _WIDTH, "A function that returns its 64 floats", _FOLDER / "empty.py"),
)
SERVERS = (LANE, MOSEC, PYTRITON, LITSERVE, BENTOML)
IN_FLIGHT = (1, 32, 128)
_SECONDS, _WARM_UP = 1.5, 0.5


def visits(number: int, server: str, shortened: float = 1.0) -> list[Visit]:
    """Return one round of a server, with each function; the order alternates."""
    found = [
        Visit(
            server,
            function.model,
            [
                Cell(function, UNARY, callers, _SECONDS * shortened, _WARM_UP, explain=callers > 1)
                for callers in IN_FLIGHT
            ],
        )
        for function in FUNCTIONS
    ]
    return found[::-1] if number % 2 else found
