"""MLServer: writes its settings and executes `mlserver start`, with gRPC and adaptive batching."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from serving.peers.settings import FOLDER, HOST, MAX_BATCH_SIZE, MODEL_NAME, PORT, WINDOW_MS

SETTINGS = {
    "host": HOST,
    "grpc_port": PORT,
    "http_port": PORT + 1,
    "metrics_port": PORT + 2,
    "metrics_endpoint": None,
    "parallel_workers": 0,  # One worker process was slower than none.
    "debug": False,
}
MODEL_SETTINGS = {
    "name": MODEL_NAME,
    "implementation": "serving.peers.mlserver_runtime.Runtime",
    "max_batch_size": MAX_BATCH_SIZE,
    "max_batch_time": WINDOW_MS / 1000,
}

if __name__ == "__main__":
    (FOLDER / "settings.json").write_text(json.dumps(SETTINGS))
    (FOLDER / "model-settings.json").write_text(json.dumps(MODEL_SETTINGS))
    os.execv(Path(sys.executable).with_name("mlserver"), ["mlserver", "start", str(FOLDER)])
