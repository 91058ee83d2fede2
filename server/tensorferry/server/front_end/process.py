"""Life cycle of a front-end process, as the supervisor orders it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from tensorferry.server.config.limits import request_limits
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.front_end.forwarding import ForwardedMethods
from tensorferry.server.front_end.remote_service import RemoteService
from tensorferry.server.front_end.report import FrontEndReport
from tensorferry.server.front_end.trials import Trials
from tensorferry.server.grpc_server import GrpcServer, Listener
from tensorferry.server.link import FrontEndLink, LinkFiles
from tensorferry.server.startup import prepare_collector, read_config, use_log_levels
from tensorferry.server.supervisor.child_process import ChildProcess
from tensorferry.server.supervisor.control import Message
from tensorferry.server.telemetry import logs
from tensorferry.server.threads import ThreadKind, new_thread, watch_threads
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher

_log = logging.getLogger("tensorferry.server")

# Time to send the last responses, after the last request is complete.
_SEND_SECONDS = 1.0


def main(control_fd: int, arguments: Sequence[str]) -> NoReturn:
    """Serve clients until the supervisor says to drain, or is gone."""
    config = read_config(arguments)
    output = logs.configure(config.log_format, config.log_level)
    control = ChildProcess(control_fd)
    use_log_levels(output, control.start["log_levels"])
    watch_threads(output.flush)
    share = share_of(config, control.start["front_ends"])
    front_end = FrontEnd(share, control.start["port"], control.send)
    drained = threading.Event()

    def drain(message: Message) -> None:
        def work() -> None:
            front_end.drain(message.fields["delay"], message.fields["seconds"])
            drained.set()

        new_thread("drain", work, ThreadKind.ESSENTIAL).start()

    control.on("link", front_end.connect)
    control.on("engine_lost", front_end.on_engine_lost)
    control.on("health", front_end.publish_health)
    control.on("log_levels", lambda message: use_log_levels(output, message.fields["levels"]))
    control.on("trial", front_end.on_trial)
    control.on("trial_ready", front_end.on_trial_ready)
    control.on("trial_over", front_end.on_trial_over)
    control.on("refuse", front_end.on_refuse)
    control.on("drain", drain)
    try:
        front_end.start()
    except StartError as error:
        control.failed(str(error))
        output.flush()
        os._exit(1)
    control.run()
    prepare_collector()
    control.send("listening", port=front_end.port, transport=front_end.transport)
    drained.wait()
    output.flush()
    os._exit(0)


def share_of(config: ServerConfig, front_ends: int) -> ServerConfig:
    """Return the configuration with a front-end's part of what bounds connections, calls and unsent responses."""

    def part(limit: int) -> int:
        # Rounded up, because 0 is no limit.
        return math.ceil(limit / front_ends)

    return replace(
        config,
        max_connections=part(config.max_connections),
        max_calls=part(config.max_calls),
        # None is the default of the transport, which is high enough for each process.
        max_streams=None if config.max_streams is None else part(config.max_streams),
        max_unsent_bytes=part(config.max_unsent_bytes),
    )


class FrontEnd:
    """One front-end. What takes a message is called by one thread, in the order of the messages.

    `report` sends a message to the supervisor.
    """

    def __init__(self, config: ServerConfig, port: int, report: Callable[..., None]) -> None:
        self._config = config
        response_batcher = ResponseBatcher()
        self._report = FrontEndReport(lambda gauge: self._grpc.gauge(gauge))
        self._trials = Trials(report)
        self._service = RemoteService(
            request_limits(config),
            response_batcher,
            self._trials,
            self._report,
            triton_status_codes=config.triton_status_codes,
        )
        self._methods = ForwardedMethods()
        self._grpc = GrpcServer(
            config,
            self._service,
            (self._methods,),
            response_batcher,
            listener=Listener(config.host, port, reuse_port=True),
            gauge_changed=self._report.gauge_changed,
        )
        # The link to an engine that has not loaded its models yet.
        self._link: FrontEndLink | None = None
        # The models that the engine has named.
        self._models: set[str] = set()
        self._stopping = threading.Event()

    @property
    def port(self) -> int:
        """The port on which the front-end listens."""
        return self._grpc.port

    @property
    def transport(self) -> str:
        """See `GrpcServer.transport`."""
        return self._grpc.transport

    def start(self) -> None:
        """Listen and serve. StartError as `GrpcServer.start`."""
        self._grpc.start()

    def connect(self, message: Message) -> None:
        """Take the link to another engine. Requests are sent once it has loaded its models."""
        self._disconnect()
        self._link = FrontEndLink(LinkFiles(*message.take_fds(3)))
        self._report.attach(self._link)
        self._methods.connect(message.fields["socket"])

    def on_engine_lost(self, message: Message) -> None:
        """Report NOT_SERVING, and keep the requests of the engine for the next one, unless none comes soon."""
        never_served = self._link is not None
        self._disconnect()
        if never_served or not message.fields["restarts"]:
            self._service.give_up()

    def on_trial(self, message: Message) -> None:
        """Take the link to an engine for suspects, see `Trials`."""
        self._trials.connect(FrontEndLink(LinkFiles(*message.take_fds(3))))

    def on_trial_ready(self, message: Message) -> None:
        """Begin with the suspects."""
        self._trials.begin()

    def on_trial_over(self, message: Message) -> None:
        """Leave the engine for suspects."""
        self._trials.end(died=message.fields["died"])

    def on_refuse(self, message: Message) -> None:
        """Refuse a request that has ended an engine for another front-end."""
        self._trials.refuse(message.fields["digest"], message.fields["until"])

    def _disconnect(self) -> None:
        self._grpc.publish_health(dict.fromkeys(self._models, False), server=False)
        self._methods.disconnect()
        self._service.disconnect()
        if self._link is not None:
            self._link.close()
            self._link.release()
            self._link = None

    def publish_health(self, message: Message) -> None:
        """Report the health that the engine has stated."""
        if message.fields["loaded"] and self._link is not None:
            self._service.connect(self._link)
            self._link = None
        serving = message.fields["serving"]
        self._models.update(serving)
        self._grpc.publish_health(serving, server=message.fields["ready"])

    def drain(self, delay: float, seconds: float) -> None:
        """Report NOT_SERVING, serve on for `delay` seconds, then finish the open calls within `seconds`."""
        if delay:
            self._grpc.announce_shutdown()
            self._stopping.wait(delay)
        self._service.begin_drain()
        self._grpc.begin_drain()
        self._grpc.report_not_serving()
        self._grpc.wait_until_sent(time.monotonic() + seconds)
        self._grpc.close(time.monotonic() + _SEND_SECONDS)
        self._service.disconnect()
        self._service.give_up()
