"""`tensorferry serve`: the server's command line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from tensorferry.server.addresses import listen_for_metrics
from tensorferry.server.config.load import unknown_variables
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.cores import Division, models_use_gpu, usable_cores
from tensorferry.server.errors import ConfigError, StartError
from tensorferry.server.installed_versions import imported
from tensorferry.server.link import ALIGNMENT, create_link
from tensorferry.server.names import printable_lines
from tensorferry.server.startup import config_file, print_ready_line, read_config
from tensorferry.server.supervisor import SupervisorSettings, log_output, run_supervisor

_log = logging.getLogger("tensorferry.server")

# Size of a link's memory for messages above 4 KiB, in each direction: room for four of the largest messages, and never
# less than 256 MiB.
_LEAST_EXTENT_BYTES = 256 << 20
_LARGEST_MESSAGES = 4


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Return 0 after a clean stop, 1 if the server cannot start, 2 for bad options."""
    try:
        config = read_config(argv)
    except ConfigError as error:
        print(printable_lines(f"tensorferry serve: {error}"), file=sys.stderr)
        return 2
    if config.front_ends != 0 and sys.platform != "linux":
        print("tensorferry serve: --front-ends needs Linux; leave it out", file=sys.stderr)
        return 2
    if config.reload:
        return _serve_reloading(config, argv)
    division = None if config.front_ends == 0 else division_for(config)
    if division is not None and division.front_ends:
        return _supervise(config, division, argv)
    # Imported here, because the supervisor does not need them, and they import numpy and the model runtime.
    run_one_process = imported("serve", "tensorferry.server.cli.one_process", "run_one_process")
    if run_one_process is None:
        return 1
    from tensorferry.server.telemetry import logs

    output = logs.configure(config.log_format, config.log_level)
    _warn_of_unknown_variables()
    if division is not None:
        _log.info("%s", division)
    return int(run_one_process(replace(config, front_ends=0), output))


def _serve_reloading(config: ServerConfig, argv: Sequence[str]) -> int:
    # Imported here, because few servers need it.
    from tensorferry.server.cli.reloading import serve_reloading

    log_output.configure(config.log_format, config.log_level)
    return serve_reloading(config, argv, config_file(argv))


def division_for(config: ServerConfig) -> Division:
    """Return how the cores are divided with this option --front-ends."""
    cores, gpu = usable_cores(), any(map(models_use_gpu, config.values("device")))
    if config.front_ends is None:
        return Division.automatic(cores, gpu=gpu)
    return Division(cores, config.front_ends, gpu)


def _warn_of_unknown_variables() -> None:
    for warning in unknown_variables(os.environ):
        _log.warning("%s", warning)


def extent_bytes(max_message_bytes: int) -> int:
    """Return the size of a link's memory for messages above 4 KiB. It is used only where messages were written."""
    largest = -(-max_message_bytes // ALIGNMENT) * ALIGNMENT
    return max(_LEAST_EXTENT_BYTES, _LARGEST_MESSAGES * largest)


def _supervise(config: ServerConfig, division: Division, argv: Sequence[str]) -> int:
    output = log_output.configure(config.log_format, config.log_level)
    _warn_of_unknown_variables()
    _log.info("%s", division)

    def print_ready(address: str, ready: Mapping[str, Any], listening: Mapping[str, Any]) -> None:
        print_ready_line(config.log_format, address, listening["transport"], ready)

    extents = extent_bytes(config.max_message_bytes)
    link = partial(create_link, request_bytes=extents, response_bytes=extents)
    try:
        with ExitStack() as stack:
            metrics_fd = None
            if config.metrics_port is not None:
                # Listened on here, so that the port stays the same, and connections wait, when the engine is replaced.
                listening = listen_for_metrics(config.metrics_host, config.metrics_port)
                metrics_fd = stack.enter_context(listening).fileno()
            settings = SupervisorSettings(
                host=config.host,
                port=config.port,
                front_ends=division.front_ends,
                drain_seconds=config.drain_seconds,
                drain_delay=config.drain_delay,
                metrics_fd=metrics_fd,
            )
            return run_supervisor(settings, argv, link, print_ready, output.put)
    except StartError as error:
        output.put(printable_lines(f"tensorferry serve: {error}"))
        return 1
