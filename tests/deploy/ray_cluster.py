"""A local Ray with the application, for the tests; runs in the environment that `make tools` makes for
Ray.

    ray_cluster.py FOLDER ARGUMENTS     Ray's own files, and the application's arguments as JSON

Prints a line of JSON: `port` once it serves, or `unable` with the reason. Then each line on stdin,
also JSON, is a command, answered by one line: "replicas" returns the process of each running
replica, arguments deploy the application again with new replicas, and "end" ends it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import ray
from ray import serve
from ray.serve.config import gRPCOptions
from ray.serve.context import _get_global_client

from tensorferry.server.ray_serve import application

NAME = "tensorferry"
# Ray waits 30 seconds for its own processes, without an option for more.
ATTEMPTS = 3


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def start_ray(folder: str) -> str | None:
    """Start Ray with as few processes as possible; return the reason of a failure after some attempts."""
    reason = None
    for attempt in range(ATTEMPTS):
        try:
            ray.init(
                # Ray starts a worker for each CPU beforehand; replicas ask for none.
                num_cpus=1,
                include_dashboard=False,
                object_store_memory=100 << 20,
                _temp_dir=f"{folder}/{attempt}",
                _node_ip_address="127.0.0.1",
                log_to_driver=False,
            )
        except Exception as error:
            reason = repr(error)
            ray.shutdown()
        else:
            return None
    return reason


def running() -> dict[str, int]:
    details = _get_global_client().get_serve_details()["applications"][NAME]
    replicas = details["deployments"]["tensorferry"]["replicas"]
    return {replica["replica_id"]: replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}


def main() -> None:
    folder, arguments = sys.argv[1], json.loads(sys.argv[2])
    # Ray may write anything to stdout, so that is redirected to the log.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(what: Any) -> None:
        print(json.dumps(what), file=told, flush=True)

    def deploy(arguments: dict[str, Any]) -> None:
        # With a route, though HTTP is not used: the gRPC ingress ignores applications without one.
        serve.run(application(arguments), name=NAME, route_prefix="/")

    if (reason := start_ray(folder)) is not None:
        tell({"unable": reason})
        return
    port = free_port()
    functions = ["tensorferry.server.ray.ingress.add_to_ingress"]
    serve.start(
        http_options={"port": free_port(), "host": "127.0.0.1"},
        grpc_options=gRPCOptions(port=port, grpc_servicer_functions=functions),
    )
    deploy(arguments)
    tell({"port": port})
    for line in sys.stdin:
        match json.loads(line):
            case "replicas":
                tell(running())
            case "end":
                break
            case {} as arguments:
                before = set(running())
                deploy(arguments)
                # Stopping replicas finish their requests first.
                while before & running().keys():
                    time.sleep(0.1)
                tell(running())
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
