"""Failures of hosts and libraries, as sentences for operators that have no secrets."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.remote.url import RemoteUrl


class RemoteError(StartError):
    """A model cannot be fetched. The message names its address, without secrets, and what to change."""


class UnreachableError(RemoteError):
    """The host cannot be reached, or does not work at the moment. A copy in the cache can be used instead."""


class TooSlowError(UnreachableError):
    """The host answers, but too slowly. The same download is not tried again."""


class ChangedError(RemoteError):
    """The file has changed while it was downloaded."""


# Classes of the libraries are recognised by name, because a library is imported only if it is used.
_NO_CREDENTIALS = frozenset(
    (
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "SSOError",
        "ProfileNotFound",
        "DefaultCredentialsError",
        "RefreshError",
        "LocalTokenNotFoundError",
    )
)
_MISSING = frozenset(("FileNotFoundError", "EntryNotFoundError"))
_UNREACHABLE = frozenset(
    (
        "ConnectionError",
        "TimeoutError",
        "IncompleteRead",
        "HTTPException",
        "HTTPClientError",
        "TransportError",
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "EndpointConnectionError",
        "ResponseStreamingError",
    )
)
_NETWORK_ERRORS = frozenset((errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ETIMEDOUT))
_BUSY = frozenset((408, 425, 429, 500, 502, 503, 504))

_CREDENTIALS = {
    "hf": "set HF_TOKEN, or run: hf auth login",
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
    "https": "use an address with credentials, https://USER:PASSWORD@HOST/..., or a presigned one",
}
_CREDENTIALS["http"] = _CREDENTIALS["https"]


def failure_of(url: RemoteUrl, error: BaseException) -> RemoteError:
    """Return the error for operators of an exception that a library has raised for this address."""
    if isinstance(error, RemoteError):
        return error
    chain = list(_chain(error))
    names = {cls.__name__ for each in chain for cls in type(each).__mro__}
    statuses = [status for each in chain if (status := _status(each))]
    codes = {code for each in chain if (code := _code(each))}
    if any(isinstance(each, socket.gaierror) for each in chain) or "ClientConnectorDNSError" in names:
        return UnreachableError(
            f"{url}: the name of the host cannot be resolved (DNS); check its spelling, and the network"
        )
    for each in chain:
        if isinstance(each, ssl.SSLError) and "CERTIFICATE" in str(each).upper():
            reason = getattr(each, "verify_message", "") or "verification failed"
            return RemoteError(
                f"{url}: the host's certificate is not trusted ({reason}); SSL_CERT_FILE can name a file of authorities"
            )
    if names & _NO_CREDENTIALS:
        return RemoteError(f"{url}: no credentials were found; {_CREDENTIALS[url.scheme]}")
    if "NoSuchBucket" in codes:
        return RemoteError(
            f"{url}: there is no bucket {url.container!r}; check its name, region and endpoint"
        )
    if "GatedRepoError" in names:
        return RemoteError(
            f"{url}: access to this repository must be granted by its owners; ask for it on the repository's page, then "
            f"{_CREDENTIALS['hf']}"
        )
    if "RevisionNotFoundError" in names:
        return RemoteError(
            f"{url}: the repository {url.container!r} has no revision {url.revision or 'main'!r}; it must be a branch, a tag or a "
            "commit"
        )
    if "RepositoryNotFoundError" in names:
        return RemoteError(
            f"{url}: there is no repository {url.container!r}, or it is private; check its name, or {_CREDENTIALS['hf']}"
        )
    if {401, 403} & set(statuses) or "PermissionError" in names:
        reason = f" ({', '.join(sorted(codes))})" if codes - {"401", "403"} else ""
        return RemoteError(
            f"{url}: permission denied{reason}; the credentials may not read it, or there are none: {_CREDENTIALS[url.scheme]}"
        )
    if 404 in statuses or 410 in statuses or names & _MISSING:
        return RemoteError(f"{url}: there is no such file or directory; check the address")
    if 412 in statuses:
        return ChangedError(f"{url} has changed while it was downloaded; try again")
    busy = next((status for status in statuses if status in _BUSY), None)
    if busy is not None:
        return UnreachableError(f"{url}: the host answered with HTTP status {busy}; try again later")
    numbers = {each.errno for each in chain if isinstance(each, OSError)}
    if (names & _UNREACHABLE and not statuses) or numbers & _NETWORK_ERRORS:
        return UnreachableError(
            f"{url}: the host cannot be reached ({url.without_secrets(_reason(chain))}); check the address and the network"
        )
    if statuses:
        return RemoteError(f"{url}: the host answered with HTTP status {statuses[0]}; check the address")
    last = chain[0]
    return RemoteError(
        f"{url} cannot be fetched: {type(last).__name__}: {url.without_secrets(_one_line(last))}"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that caused it, also those that libraries keep as attributes."""
    found: list[BaseException] = []
    waiting: list[Any] = [error]
    while waiting:
        each = waiting.pop(0)
        if not isinstance(each, BaseException) or any(each is other for other in found):
            continue
        found.append(each)
        yield each
        # `reason` is urllib's, `os_error` aiohttp's, `error` botocore's.
        waiting += [each.__cause__, each.__context__]
        waiting += [getattr(each, name, None) for name in ("reason", "os_error")]
        waiting.append(getattr(each, "kwargs", {}).get("error") if hasattr(each, "kwargs") else None)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an exception of urllib, huggingface_hub, botocore, aiohttp or gcsfs."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        response = getattr(response, "status_code", None)
    for value in (response, getattr(error, "code", None), getattr(error, "status", None)):
        text = str(value)
        if text.isdecimal() and 400 <= int(text) < 600:
            return int(text)
    return None


def _code(error: BaseException) -> str | None:
    """Return the code of an error of S3, such as AccessDenied."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code if isinstance(code, str) and code.isalnum() else None


def _reason(chain: list[BaseException]) -> str:
    """Return the system's words for a failed connection, else the kind of the failure."""
    for each in chain:
        if isinstance(each, OSError) and each.strerror:
            return each.strerror
    return _one_line(chain[-1]) or type(chain[-1]).__name__


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def has_no_credentials(error: BaseException) -> bool:
    """Return whether a library has found no credentials."""
    return any(type(each).__name__ == "NoCredentialsError" for each in _chain(error))
