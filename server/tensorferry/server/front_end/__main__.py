"""A front-end process: `python -m tensorferry.server.front_end CONTROL_FD ARGUMENTS`, started by the supervisor."""

from __future__ import annotations

from tensorferry.server.startup import run_child

if __name__ == "__main__":
    run_child("tensorferry.server.front_end.process")
