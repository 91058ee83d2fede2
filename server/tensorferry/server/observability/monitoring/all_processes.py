"""Statistics, metrics and status of a server of several processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from prometheus_client.exposition import choose_encoder

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.observability.monitoring.http_server import PageRenderer
from tensorferry.server.observability.monitoring.merged import (
    joined_page,
    labelled_page,
    merged_statistics,
    merged_status,
)
from tensorferry.server.processes.peers import Peers

_STATISTICS, _METRICS, _STATUS = "statistics", "metrics", "status"

Statistics = Callable[[pb.ModelStatisticsRequest], pb.ModelStatisticsResponse]


def statistics_of_all(peers: Peers, own: Statistics) -> Statistics:
    """Return ModelStatistics of all processes. `own` returns that of this one, for the others too."""

    def answer(content: bytes) -> bytes:
        return own(pb.ModelStatisticsRequest.FromString(content)).SerializeToString()

    def statistics(request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        answers = peers.ask(_STATISTICS, request.SerializeToString())
        return merged_statistics([pb.ModelStatisticsResponse.FromString(each) for each in answers])

    peers.on(_STATISTICS, answer)
    return statistics


def page_of_all(peers: Peers, own: PageRenderer) -> PageRenderer:
    """Return the metrics page of all processes. `own` returns that of this one, for the others too."""

    def page(accept: str) -> tuple[bytes, str]:
        return joined_page(peers.ask(_METRICS, accept.encode())), choose_encoder(accept)[1]

    peers.on(_METRICS, lambda content: labelled_page(own(content.decode())[0], peers.index))
    return page


def status_of_all(peers: Peers, own: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Return the status of all processes. `own` returns that of this one, for the others too."""
    peers.on(_STATUS, lambda content: json.dumps(own()).encode())
    return lambda: merged_status([json.loads(each) for each in peers.ask(_STATUS)])
