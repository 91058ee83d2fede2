"""`tensorferry` without the rule for returning callers: no batch waits for them. For `closed_server.py`.

python benchmarks/greedy_server.py serve model.onnx
"""

from __future__ import annotations

import sys
from unittest.mock import patch

from closed_loop import Greedy

from tensorferry.server.__main__ import main

if __name__ == "__main__":
    with patch("tensorferry.batcher.queue.request_queue.ReturnModel", Greedy):
        sys.exit(main())
