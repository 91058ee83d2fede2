"""The engine process: `python -m tensorferry.server.engine CONTROL_FD ARGUMENTS`, started by the supervisor."""

from __future__ import annotations

import sys

from tensorferry.server import malloc
from tensorferry.server.installed_versions import imported
from tensorferry.server.transport import grpc_environment

if __name__ == "__main__":
    # Before grpc is imported.
    grpc_environment.prepare()
    malloc.reuse_large_buffers()
    main = imported("serve", "tensorferry.server.engine.process", "main")
    if main is None:
        sys.exit(1)
    main(int(sys.argv[1]), sys.argv[2:])
