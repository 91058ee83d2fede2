"""What the server is told, as records."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tensorferry.protos.model_config_pb2 import ModelConfig


class ConfigError(Exception):
    """An option has a bad value: the message names the option, the value, and what is allowed."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model version to serve: its name, and the ONNX file.

    `config` is what the model's config.pbtxt says, as it stands there, None where there is none;
    `directory` is the model's in its repository, None for one that was named by its file. The files are there for as
    long as somebody has `files`: a model whose device fails is loaded again.
    """

    name: str
    path: Path
    version: str = "1"
    config: ModelConfig | None = None
    directory: Path | None = None
    files: object = field(default=None, compare=False, repr=False)


class PadLengths(NamedTuple):
    """The name of the axis that is padded, and the lengths that it is padded to, ascending."""

    axis: str
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that the server is told. Times in seconds, sizes in bytes; see `options.py`."""

    models: tuple[ModelSource, ...]
    model_repositories: tuple[Path, ...] = ()
    model_control: str = "none"
    load_models: tuple[str, ...] = ()
    repository_poll_seconds: float = 15.0
    exit_on_error: bool = True
    host: str = "127.0.0.1"
    port: int = 8001
    transport: str = "auto"
    device: str = "auto"
    cuda_memory_bytes: int | None = None
    cuda_memory_growth: str = "doubling"
    cudnn_search: str = "exhaustive"
    tf32: bool = True
    fp16: bool = False
    fp16_tolerance: float = 0.02
    fp16_except: tuple[str, ...] = ()
    max_batch_size: int = 32
    batching: str = "tested"
    pad_lengths: PadLengths | None = None
    pad_values: tuple[tuple[str, str], ...] = ()
    max_queue_delay: float = 0.0
    preferred_batch_sizes: tuple[int, ...] = ()
    priority_weights: tuple[int, ...] = (1,)
    default_priority: int = 0
    slo: float = 0.0
    max_queue_size: int = 4096
    max_queue_bytes: int = 1 << 30
    max_message_bytes: int = 64 << 20
    drain_seconds: float = 30.0
    run_timeout: float = 600.0
    exit_on_device_loss: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    triton_status_codes: bool = False
    allow_shared_memory: bool = False
    allow_log_settings: bool = False
    trace_file: Path | None = None
    otel: bool = False
    access_log: int = 0
    cuda_graphs: tuple[int, ...] | None = None
    tensorrt_cache: Path | None = None
    log_format: str = "text"
    log_level: str = "info"
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    auth_tokens: Path | None = None
    auth_certificates: Path | None = None
    auth_exempt_health: bool = True
    auth_over_plaintext: bool = False
    reflection: bool = True
    max_request_rows: int = 0
    max_strings: int = 1 << 16
    max_string_bytes: int = 16 << 20
    max_unsent_bytes: int = 1 << 30
    max_calls: int = 16384
    max_streams: int | None = None
    max_in_flight_per_stream: int = 64
    max_connections: int = 0
    max_calls_per_connection: int = 0
    max_metadata_bytes: int = 16384
    client_max_requests: int = 0
    client_max_rows: int = 0
    client_max_bytes: int = 0
    client_rate: float = 0.0
    client_burst: int = 0
    fair_share: bool = False
    client_weights: tuple[tuple[str, int], ...] = ()
    drain_delay: float = 0.0
    max_connection_age: float = 0.0
