"""`tensorferry` of several processes, each a `faulty_server`. It imports no more than the supervisor needs."""

from __future__ import annotations

import sys

from support.processes.children import serve_with_children

from tensorferry.server.__main__ import main

MODULE = "chaos.faulty_server"

if __name__ == "__main__":
    serve_with_children(MODULE)
    sys.exit(main())
