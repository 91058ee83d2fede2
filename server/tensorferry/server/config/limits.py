"""Limits of requests and clients, as records for the packages that apply them."""

from __future__ import annotations

from dataclasses import dataclass

from tensorferry.batcher import ClientPolicy
from tensorferry.server.config.server_config import ServerConfig


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The operator's limits on one inference request.

    `rows` is 0 for as many as the queue holds. `string_bytes` is the longest string of a tensor, `message_bytes` the
    largest decompressed message.
    """

    rows: int = ServerConfig.max_request_rows
    string_bytes: int = ServerConfig.max_string_bytes
    message_bytes: int = ServerConfig.max_message_bytes


def client_policy(config: ServerConfig) -> ClientPolicy | None:
    """Return the limits of each client in the queue of a model; None if there are none."""
    policy = ClientPolicy(
        max_requests=config.client_max_requests,
        max_rows=config.client_max_rows,
        max_bytes=config.client_max_bytes,
        rate=config.client_rate,
        fair=config.fair_share,
        weights=dict(config.client_weights),
    )
    return policy if policy.fair or policy.bounds else None
