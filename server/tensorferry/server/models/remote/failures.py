"""Failures of hosts and libraries, as sentences for operators that have no secrets."""

from __future__ import annotations

import errno
import re
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.models.remote.url import RemoteUrl
from tensorferry.server.system.install_command import install_command


class RemoteError(StartError):
    """A model cannot be fetched. The message names its address, without secrets, and what to change."""


class AbsentError(RemoteError):
    """The host has no such file."""


class UnreachableError(RemoteError):
    """The host cannot be reached, or does not work at the moment. A copy in the cache can be used instead."""


class ChangedError(RemoteError):
    """The file has changed while it was downloaded."""


_WEB_CREDENTIALS = "use an address with credentials, https://USER:PASSWORD@HOST/..., or a presigned one"
_CREDENTIALS = {
    "hf": "set HF_TOKEN, or run: hf auth login",
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
    "https": _WEB_CREDENTIALS,
    "http": _WEB_CREDENTIALS,
}
_EXTRAS = {"gs": "gcs"}
_NO_CREDENTIALS = (
    "NoCredentialsError PartialCredentialsError CredentialRetrievalError TokenRetrievalError SSOError ProfileNotFound "
    "DefaultCredentialsError RefreshError LocalTokenNotFoundError"
)
_CONNECTION = (
    "ConnectionError TimeoutError IncompleteRead HTTPException HTTPClientError TransportError ClientConnectionError "
    "ClientPayloadError ConnectTimeoutError ReadTimeoutError EndpointConnectionError ResponseStreamingError "
    "ENETUNREACH EHOSTUNREACH ENETDOWN ETIMEDOUT"
)
# The first entry that shares a sign with a failure describes it. A sign is the name of a class, because a library is imported
# only if it is used; or the name of an errno, an HTTP status, or a code of S3.
_KINDS: tuple[tuple[str, type[RemoteError], str], ...] = (
    ("ENOSPC EDQUOT", RemoteError, "it cannot be stored: {reason}; make room, or name another directory by --model-cache"),
    ("gaierror ClientConnectorDNSError", UnreachableError, "the name of the host cannot be resolved (DNS); check its spelling, and the network"),
    ("SSLCertVerificationError", RemoteError, "the host's certificate is not trusted ({reason}); SSL_CERT_FILE can name a file of authorities"),
    (_NO_CREDENTIALS, RemoteError, "no credentials were found; {credentials}"),
    ("NoSuchBucket", RemoteError, "there is no bucket {url.container!r}; check its name, region and endpoint"),
    ("GatedRepoError", RemoteError, "access to this repository must be granted by its owners; ask for it on the repository's page, then {credentials}"),
    ("RevisionNotFoundError", RemoteError, "the repository {url.container!r} has no revision {revision!r}; it must be a branch, a tag or a commit"),
    ("RepositoryNotFoundError", RemoteError, "there is no repository {url.container!r}, or it is private; check its name, or {credentials}"),
    ("401 403 PermissionError", RemoteError, "permission denied{codes}; the credentials may not read it, or there are none: {credentials}"),
    ("404 410 FileNotFoundError EntryNotFoundError", AbsentError, "there is no such file or directory; check the address"),
    ("412", ChangedError, "it has changed while it was downloaded; try again"),
    ("408 425 429 500 502 503 504", UnreachableError, "the host answered with HTTP status {status}; try again later"),
    ("status", RemoteError, "the host answered with HTTP status {status}; check the address"),
    (_CONNECTION, UnreachableError, "the host cannot be reached ({reason}); check the address and the network"),
    ("ModuleNotFoundError", RemoteError, "the package {module} is missing, which {url.scheme}:// needs: {install}"),
    ("BaseException", RemoteError, "it cannot be fetched: {kind}: {reason}"),
)  # fmt: skip


class NoSuchBucket(FileNotFoundError):
    """An object is missing because its bucket is."""


def failure_of(url: RemoteUrl, error: BaseException) -> RemoteError:
    """Return the error for operators of an exception that a library has raised for this address."""
    chain = _chain(error)
    for each in chain:
        if isinstance(each, RemoteError):
            return each
    statuses = [status for each in chain if (status := _status(each))]
    codes = {str(_answer(each).get("Error", {}).get("Code", "")) for each in chain} - {*statuses}
    # Other text of a host is not for the log.
    codes = {code for code in codes if code.isalnum()}
    signs = {kind.__name__ for each in chain for kind in type(each).__mro__} | codes | {*statuses}
    signs |= {errno.errorcode.get(each.errno or 0, "") for each in chain if isinstance(each, OSError)}
    kind, text = next(
        (kind, text)
        for wanted, kind, text in _KINDS
        if not {*wanted.split()}.isdisjoint(signs | ({"status"} if statuses else set()))
    )
    said = text.format(
        url=url,
        revision=url.revision or "main",
        credentials=_CREDENTIALS[url.scheme],
        codes=f" ({', '.join(sorted(codes))})" if codes else "",
        status=next(iter(statuses), ""),
        kind=type(error).__name__,
        module=getattr(error, "name", ""),
        install=install_command(_EXTRAS.get(url.scheme, url.scheme)),
        reason=url.without_secrets(_reason(chain)),
    )
    return kind(f"{url}: {said}")


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an exception and those that caused it."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _answer(error: BaseException) -> dict[str, Any]:
    """Return the answer that an exception of botocore has."""
    answer = getattr(error, "response", None)
    return answer if isinstance(answer, dict) else {}


def _status(error: BaseException) -> str | None:
    """Return the HTTP status in an exception of urllib, huggingface_hub, botocore, aiohttp or gcsfs."""
    of_hub = getattr(getattr(error, "response", None), "status_code", None)
    of_s3 = _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    for value in (of_hub, of_s3, getattr(error, "code", None), getattr(error, "status", None)):
        if re.fullmatch("[45][0-9][0-9]", str(value)):
            return str(value)
    return None


def _reason(chain: list[BaseException]) -> str:
    """Return the system's words for a failure, else the library's."""
    words = next(
        (each.strerror for each in chain if isinstance(each, OSError) and each.errno and each.strerror), None
    )
    return " ".join(str(words or chain[-1]).split())[:300] or type(chain[-1]).__name__
