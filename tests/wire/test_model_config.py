"""A repository's config.pbtxt in a real server, read by tritonclient: completed, overridden, refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e.fixtures import Serve
from google.protobuf import text_format
from support.models import small
from support.processes.server import command, environment
from support.wire.inputs import tensor
from support.wire.rig import PATIENCE

CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: 4 } }
dynamic_batching { max_queue_delay_microseconds: 500 default_queue_policy { max_queue_size: 100 } }
instance_group { count: 2 kind: KIND_CPU }
optimization { graph { level: 1 } input_pinned_memory { enable: true } }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
model_warmup { name: "zeros" batch_size: 8 inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }
response_cache { enable: true }
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with the model `m`, y = 2 x."""
    home = tmp_path / "models" / "m"
    (home / "1").mkdir(parents=True)
    small.twice(home / "1" / "model.onnx", dims=("batch", 4))
    (home / "config.pbtxt").write_text(CONFIG)
    return home.parent


def printed(root: Path) -> str:
    """Return the output of `tensorferry config` for the model."""
    done = subprocess.run(
        command("config", root / "m", "--log-level", "error"),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


def test_the_server_uses_the_configuration_that_the_command_prints(root: Path, serve: Serve) -> None:
    server = serve("--model-repository", root)
    with triton.InferenceServerClient(server.address) as client:
        config = client.get_model_config("m").config
        # Parsed with tritonclient's own messages.
        assert config == text_format.Parse(printed(root), type(config)())
        assert (config.dynamic_batching.preferred_batch_size, config.instance_group[0].count) == ([8], 2)
        x = np.arange(8, dtype=np.float32).reshape(2, 4)
        answer = client.infer("m", [tensor("x", x, "FP32")], client_timeout=PATIENCE)
        assert answer.as_numpy("y").tolist() == (2 * x).reshape(2, 2, 2).tolist()
    assert server.stop() == 0
    assert any("has response_cache, but no answer is kept" in line for line in server.log)
    assert any("on 2 × cpu in" in line or "on 2 \\u00d7 cpu in" in line for line in server.log)
