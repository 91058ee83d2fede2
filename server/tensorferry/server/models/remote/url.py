"""Addresses of models that are elsewhere: hf://, s3://, gs:// and https://."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from urllib.parse import quote, unquote

from tensorferry.server.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FORMS = {
    "hf": "hf://ORG/REPO/model.onnx or hf://ORG/REPO@REVISION/model.onnx",
    "s3": "s3://BUCKET/model.onnx",
    "gs": "gs://BUCKET/model.onnx",
    "https": "https://HOST/model.onnx",
    "http": "http://HOST/model.onnx",
}
# Their hosts cannot list files, so that they have no repositories.
_WEB = ("http", "https")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
# Parameters that sign a URL of S3 or Google Cloud Storage, or limit its time: they say nothing about the file.
_SIGNING = re.compile(r"(?i)(x-amz-|x-goog-)")
_SUFFIXES = (".onnx", ".ort", ".json")


def is_safe(name: str) -> bool:
    """Return whether a relative path stays in its directory."""
    parts = PurePosixPath(name).parts
    # What follows "//", in names of objects, is an absolute path by itself.
    unsafe = not parts or name.startswith("/") or "//" in name or ".." in parts
    return not unsafe and not any(ord(character) < 32 or character == "\\" for character in name)


def is_remote(text: str) -> bool:
    """Return whether a MODEL or DIR is an address elsewhere, and not a path."""
    return _SCHEME.match(text) is not None


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """Address of a file or directory elsewhere. `str` and `repr` have no secrets.

    `container` is the host of https, the bucket of s3 and gs, and the repository of hf. `path` is as written, without a
    leading slash. `text` is the whole address, with its secrets. `pins` are the SHA-256 hashes that files must have: "" is
    the file itself, other keys are files beside it.
    """

    scheme: str
    container: str
    path: str
    revision: str = ""
    query: str = field(default="", repr=False)
    credentials: str = field(default="", repr=False)
    pins: tuple[tuple[str, str], ...] = ()
    text: str = field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        # Values of a web address's query can be secrets.
        query = "" if not self.query else "?..." if self.scheme in _WEB else f"?{self.query}"
        return f"{self.scheme}://{self.container}{revision}/{self.path}{query}"

    @property
    def location(self) -> str:
        """The path as the host knows it: of web addresses without percent-encoding."""
        return unquote(self.path) if self.scheme in _WEB else self.path

    @property
    def file_name(self) -> str:
        """The name of the local file. It ends in .onnx, .ort or .json, by which files are recognised."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(self.location).name).lstrip(".") or "model"
        return name if name.endswith(_SUFFIXES) else f"{name}.onnx"

    @property
    def model_name(self) -> str:
        """The name of the model if the operator gives none."""
        return PurePosixPath(self.location).name.removesuffix(".onnx")

    @property
    def version_id(self) -> str | None:
        """The version of an object in a versioned bucket, if the address names one."""
        return self.query.removeprefix("versionId=") if self.query and self.scheme == "s3" else None

    @property
    def immutable(self) -> bool:
        """Whether the address names one version of the file, so that the host need not be asked for changes."""
        return self.version_id is not None or (self.scheme == "hf" and bool(_COMMIT.fullmatch(self.revision)))

    @property
    def key(self) -> str:
        """The name of a directory for this address: its file's name, and a hash of what identifies it."""
        query = "&".join(part for part in self.query.split("&") if not _SIGNING.match(part))
        identity = "\0".join((self.scheme, self.container, self.revision, self.path, query, self.credentials))
        name = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(self.location or self.container).name)[:60]
        return f"{name.lstrip('.')}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"

    def pin(self, name: str) -> str | None:
        """Return the hash that a local file must have, this or one beside it; None if any is right."""
        return dict(self.pins).get("" if name == self.file_name else name)

    def beside(self, name: str) -> RemoteUrl:
        """Return the address of a file beside this one; `name` is a relative path."""
        web = self.scheme in _WEB
        path = self.path[: self.path.rfind("/") + 1] + (quote(name) if web else name)
        return replace(self, path=path, query=self.query if web else "", pins=(), text="")

    def below(self, name: str) -> RemoteUrl:
        """Return the address of a file in this directory; `name` is a relative path."""
        return replace(self, path=f"{self.path}/{name}".lstrip("/"), text="")

    def without_secrets(self, text: str) -> str:
        """Return a text of a library without what could be a secret: queries, credentials and values of this address."""
        values = [part.partition("=")[2] for part in self.query.split("&")] + self.credentials.split(":")
        for value in sorted({each for raw in values for each in (raw, unquote(raw))}, key=len, reverse=True):
            if len(value) > 3:
                text = text.replace(value, "...")
        text = re.sub(r"(\w+://)[^\s/@]*@", r"\1", text)
        return re.sub(r"\?[^\s'\")>]+", "?...", text)


def parse_url(text: str) -> RemoteUrl:
    """Return an address. ConfigError, without its secrets, if it is malformed."""
    match = _SCHEME.match(text)
    scheme = match[1].lower() if match else ""
    rest, _, fragment = text[len(scheme) + 3 :].partition("#")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    credentials, _, authority = authority.rpartition("@") if scheme in _WEB else ("", "", authority)
    shown = f"{scheme}://{authority}/{path}"
    if scheme not in _FORMS:
        raise ConfigError(
            f"{shown} has the scheme {scheme!r}; it must be one of {', '.join(_FORMS)}, or give the path of a local file"
        )
    revision = ""
    if scheme == "hf":
        repo, _, path = path.partition("/")
        repo, _, revision = repo.partition("@")
        authority = f"{authority}/{repo}" if repo else ""
    if not authority or any(ord(character) <= 32 for character in authority + path + query):
        raise ConfigError(f"{shown} is not the address of a model; it must be {_FORMS[scheme]}")
    if query and scheme not in _WEB and not (scheme == "s3" and query.startswith("versionId=")):
        known = "only ?versionId=" if scheme == "s3" else "nothing"
        raise ConfigError(
            f"{shown} has a query after '?'; {scheme}:// can have {known}, and names of files cannot have '?' or '#'"
        )
    pins = _pins(fragment, shown)
    return RemoteUrl(scheme, authority, path, unquote(revision), query, credentials, pins, text)


def _pins(fragment: str, shown: str) -> tuple[tuple[str, str], ...]:
    pins: dict[str, str] = {}
    for part in filter(None, fragment.split("&")):
        name, _, value = part.partition("=")
        if not name or not _SHA256.fullmatch(value):
            raise ConfigError(
                f"{shown} has {'#' + part!r}; it must be #sha256= and 64 hexadecimal digits, and &FILE= and as many for each "
                "file beside the model"
            )
        pins["" if name == "sha256" else unquote(name)] = value.lower()
    if pins and "" not in pins:
        raise ConfigError(f"{shown} has hashes of files beside the model, but not its own; add #sha256=")
    return tuple(pins.items())


def parse_file(text: str) -> RemoteUrl:
    """Return the address of a file. ConfigError if it is malformed, or that of a directory or of code."""
    url = parse_url(text)
    if not url.path or url.path.endswith("/"):
        raise ConfigError(f"{url} names no file; it must be {_FORMS[url.scheme]}")
    if url.location.endswith(".py"):
        raise ConfigError(
            f"{url} is Python code, which would run in the server; copy it to this machine and serve the copy"
        )
    return url


def parse_repository(text: str) -> RemoteUrl:
    """Return the address of a model repository. ConfigError if it is malformed, or its host cannot list files."""
    url = parse_url(text)
    if url.scheme in _WEB:
        raise ConfigError(
            f"{url} cannot be a model repository, because {url.scheme}:// cannot list files; it must be s3://BUCKET/PREFIX, "
            "gs://BUCKET/PREFIX or hf://ORG/REPO"
        )
    if url.pins or url.query:
        raise ConfigError(
            f"{url} is a model repository, which can have neither a hash nor a version; leave it out"
        )
    path = url.path.strip("/")
    if not is_safe(f"{url.container}/{path}".rstrip("/")):
        # A directory of this machine gets this path, and what the repository does not have is removed there.
        raise ConfigError(f"{url} has a path that leads elsewhere; leave out '..' and '//'")
    return replace(url, path=path)
