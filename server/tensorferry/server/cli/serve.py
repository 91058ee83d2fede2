"""`tensorferry serve`: the server's command line."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from tensorferry.server.config.flags import config_file, read_flags
from tensorferry.server.config.load import unknown_variables
from tensorferry.server.config.server_config import OPTIONS, ServerConfig
from tensorferry.server.errors import ConfigError, StartError
from tensorferry.server.names import printable_lines
from tensorferry.server.processes import log_output
from tensorferry.server.processes.division import Division, division_of
from tensorferry.server.processes.event_loop import run_supervisor
from tensorferry.server.processes.supervisor import SupervisorSettings
from tensorferry.server.startup import command_parser, read_config
from tensorferry.server.system.addresses import listen_for_http, listen_for_metrics
from tensorferry.server.system.installed_versions import imported

_log = logging.getLogger("tensorferry.server")


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Return 0 after a clean stop, 1 if the server cannot start, 2 for bad options."""
    try:
        config = read_config(argv)
    except ConfigError as error:
        print(printable_lines(f"tensorferry serve: {error}"), file=sys.stderr)
        return 2
    if config.processes != 1 and sys.platform != "linux":
        print("tensorferry serve: --processes needs Linux; leave it out", file=sys.stderr)
        return 2
    if config.reload:
        return _serve_reloading(config, argv)
    division = None if config.processes == 1 else division_of(config)
    if division is not None and division.processes > 1:
        return _supervise(config, division, argv)
    # Imported here, because the supervisor does not need them, and they import numpy and the model runtime.
    run_one_process = imported("serve", "tensorferry.server.cli.one_process", "run_one_process")
    if run_one_process is None:
        return 1
    from tensorferry.server.observability.logs import logs

    output = logs.configure(config.log_format, config.log_level)
    _warn_of_unknown_variables()
    if division is not None:
        _log.info("%s", division)
    return int(run_one_process(config, output))


def _serve_reloading(config: ServerConfig, argv: Sequence[str]) -> int:
    # Imported here, because few servers need it.
    from tensorferry.server.cli.reloading import serve_reloading

    log_output.configure(config.log_format, config.log_level)
    arguments, _ = read_flags(command_parser(), argv, OPTIONS)
    return serve_reloading(config, argv, config_file(arguments))


def _warn_of_unknown_variables() -> None:
    for warning in unknown_variables(os.environ):
        _log.warning("%s", warning)


def _supervise(config: ServerConfig, division: Division, argv: Sequence[str]) -> int:
    output = log_output.configure(config.log_format, config.log_level)
    _warn_of_unknown_variables()
    _log.info("%s", division)
    try:
        with ExitStack() as stack:
            # Listened on here, so that the ports stay the same, and connections wait, when a process is replaced.
            sockets: dict[str, socket.socket] = {}
            if config.metrics_port is not None:
                metrics = listen_for_metrics(config.metrics_host, config.metrics_port)
                sockets["metrics"] = stack.enter_context(metrics)
            if config.http_port is not None:
                sockets["http"] = stack.enter_context(listen_for_http(config.host, config.http_port))
            settings = SupervisorSettings(
                host=config.host,
                port=config.port,
                processes=division.processes,
                drain_seconds=config.drain_seconds,
                drain_delay=config.drain_delay,
                sockets=sockets,
                gpus=division.gpus,
            )
            return run_supervisor(settings, argv, output.put)
    except StartError as error:
        output.put(printable_lines(f"tensorferry serve: {error}"))
        return 1
