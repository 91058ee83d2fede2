"""A Ray of its own with the application, for the tests; runs in the environment that `make tools` makes for Ray.

    ray_cluster.py ARGUMENTS     the application's, as JSON

Prints a line of JSON with the port when it serves. Then each line on stdin is carried out and answered by one:
`replicas` says how many run, `redeploy` replaces them all, `end` ends it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from typing import Any

import ray
from ray import serve
from ray.serve.config import gRPCOptions

from tensorferry.server.ray_serve import application

NAME = "tensorferry"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def running() -> int:
    deployment = serve.status().applications[NAME].deployments["tensorferry"]
    return int(deployment.replica_states.get("RUNNING", 0))


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    # Ray writes to stdout what it likes: that goes where its log goes.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=100 << 20,
            _temp_dir=folder,
            log_to_driver=False,
        )
        functions = ["tensorferry.server.ray_ingress.add_to_ingress"]
        serve.start(
            http_options={"port": free_port(), "host": "127.0.0.1"},
            grpc_options=gRPCOptions(port=port, grpc_servicer_functions=functions),
        )
        serve.run(application(arguments), name=NAME)
        print(json.dumps({"port": port}), file=told, flush=True)
        for line in sys.stdin:
            match line.strip():
                case "replicas":
                    print(json.dumps(running()), file=told, flush=True)
                case "redeploy":
                    serve.run(application(arguments), name=NAME)
                    print(json.dumps(running()), file=told, flush=True)
                case "end":
                    break
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
