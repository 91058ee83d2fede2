"""What the transports of a process share, so that a client finds the same limits at each."""

from __future__ import annotations

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.security.access_control import access_control_for
from tensorferry.server.security.tls import TlsFiles
from tensorferry.server.transport.call_admission import OpenCalls
from tensorferry.server.transport.unread_responses import UnreadResponses


class TransportState:
    """The open calls, the responses that clients have not read, the access control and the TLS files; None for neither.

    `cors_origins` are those whose pages may call over HTTP.
    Call `open` before the transports start.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.calls = OpenCalls(config.max_calls)
        self.unread = UnreadResponses(config.max_unsent_bytes)
        self.access = access_control_for(config)
        self.cors_origins = config.http_cors_origins
        self.requires_credentials = config.auth_tokens is not None or config.auth_certificates is not None
        self.tls: TlsFiles | None = None

    def open(self) -> None:
        """Read the files. StartError if one cannot be used."""
        config = self._config
        if self.access is not None:
            self.access.open()
        for option in ("tls_certificate", "tls_key", "tls_client_ca"):
            path = getattr(config, option)
            if path is not None and not path.is_file():
                raise StartError(f"--{option.replace('_', '-')}: {path} is not a file; name a PEM file")
        if config.tls_certificate is not None and config.tls_key is not None:
            self.tls = TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)
