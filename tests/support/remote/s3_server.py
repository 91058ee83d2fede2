"""A real S3 server, moto's, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_PROGRAM = """
import logging
from werkzeug.serving import make_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
logging.disable(logging.CRITICAL)
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass(frozen=True)
class S3Server:
    """A running server without objects at first."""

    url: str
    process: subprocess.Popen[str]

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment with which clients find the server."""
        return {**client_variables(self.url), **CREDENTIALS}

    def files(self) -> Any:
        """Return a file system with which tests fill buckets. The variables must be set."""
        import s3fs

        return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests"}


def client_variables(url: str) -> Mapping[str, str]:
    """Return variables that lead clients of S3 to a server, and away from what the machine has configured."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server on a port of its own."""
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        yield S3Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
