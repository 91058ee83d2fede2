"""What the transports of a process share, so that a client finds the same limits at each."""

from __future__ import annotations

import threading

from tensorferry.server.config.limits import client_policy
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.security.access_control import AccessControl
from tensorferry.server.security.tls import TlsFiles
from tensorferry.server.transport.unread_responses import UnreadResponses


class OpenCalls:
    """Counts the open inference calls of all transports: at most `most` unary ones, and any number of streams. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        # Guards the fields below. Nothing is called while it is held.
        self._lock = threading.Lock()
        # Admitted calls that the transport has not ended.
        self._unary_calls = self._streams = 0
        # Notified when no call is open while _stopping is set, because notifying costs more than counting.
        self._none_open = threading.Condition(self._lock)
        self._stopping = False

    def begin_unary(self) -> bool:
        """Count a unary call; return False if there are too many."""
        with self._lock:
            if self._unary_calls >= self.most:
                return False
            self._unary_calls += 1
            return True

    def end_unary(self) -> None:
        """Stop counting a unary call."""
        with self._lock:
            self._unary_calls -= 1
            if self._stopping and not self._unary_calls and not self._streams:
                self._none_open.notify_all()

    def begin_stream(self) -> None:
        """Count a stream."""
        with self._lock:
            self._streams += 1

    def end_stream(self) -> None:
        """Stop counting a stream."""
        with self._lock:
            self._streams -= 1
            if self._stopping and not self._unary_calls and not self._streams:
                self._none_open.notify_all()

    def wait_until_none(self, timeout: float) -> bool:
        """Wait until no call is open; return false if some are after `timeout` seconds."""
        with self._lock:
            # Never reset: the server stops.
            self._stopping = True
            return self._none_open.wait_for(lambda: not self._unary_calls and not self._streams, timeout)


class TransportState:
    """The open calls, the responses that clients have not read, the access control and the TLS files; None for neither.

    `cors_origins` are those whose pages may call over HTTP.
    Call `open` before the transports start.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.calls = OpenCalls(config.max_calls)
        self.unread = UnreadResponses(config.max_unsent_bytes)
        self.cors_origins = config.http_cors_origins
        self.requires_credentials = config.auth_tokens is not None or config.auth_certificates is not None
        self.access: AccessControl | None = None
        if self.requires_credentials or client_policy(config) is not None:
            self.access = AccessControl(tokens=config.auth_tokens, certificates=config.auth_certificates)
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
