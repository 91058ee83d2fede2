"""Objects in buckets of S3 and Google Cloud Storage, through fsspec's file systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from tensorferry.server.remote.failures import ChangedError, RemoteError, failure_of, has_no_credentials
from tensorferry.server.remote.stores import RemoteFile, package
from tensorferry.server.remote.url import RemoteUrl

_T = TypeVar("_T")

# Size of each request: large, because a request takes tens of milliseconds, but not so large that it takes minutes.
CHUNK_BYTES = 8 << 20
# Of S3's client, in seconds and attempts. Downloads are continued after a failure, so few attempts are enough.
_S3_CLIENT = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}


class ObjectStore:
    """Buckets of one kind, by fsspec's interface.

    `open_filesystem` gets an address, and whether to send no credentials. Only for one thread at a time.
    """

    def __init__(
        self, open_filesystem: Callable[[RemoteUrl, bool], Any], chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._open_filesystem = open_filesystem
        self._chunk_bytes = chunk_bytes
        # By whether objects of a versioned bucket are meant, because that is a setting of a file system.
        self._filesystems: dict[bool, Any] = {}
        self._anonymous = False

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the current state of an object, or of the version that the address names."""
        info = self._call(url, lambda files: files.info(_path(url), **_version_of(url)))
        if info.get("type") == "directory":
            raise RemoteError(f"{url} is a prefix of objects, not an object; give the address of a file")
        return _described(url, info)

    def read(self, file: RemoteFile, offset: int) -> tuple[int, Iterator[bytes]]:
        """Return the bytes from `offset` on."""
        return offset, self._chunks(file, offset)

    def _chunks(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        url, size = file.url, file.size or 0
        while offset < size:
            chunk = self._range(url, offset, min(offset + self._chunk_bytes, size))
            if not chunk:
                break
            yield chunk
            offset += len(chunk)
        # The parts may be of two versions.
        if self.describe(url).version != file.version:
            raise ChangedError(f"{url} has changed while it was downloaded; try again")

    def _range(self, url: RemoteUrl, start: int, end: int) -> bytes:
        def read(files: Any) -> bytes:
            content: bytes = files.cat_file(_path(url), start=start, end=end, **_version_of(url))
            return content

        return self._call(url, read)

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        """Return all objects below a prefix. An object whose name ends in a slash stands for an empty directory."""
        root = _path(url)
        found: Mapping[str, Any] = self._call(url, lambda files: files.find(root, detail=True))
        listed = {}
        for path, info in found.items():
            name = path.removeprefix(root).lstrip("/")
            if name and path.startswith(f"{root}/"):
                listed[name] = _described(url.below(name), info)
        if not listed:
            # An empty list does not show whether the bucket exists.
            self._call(url, lambda files: files.ls(url.container, detail=False))
        return listed

    def _call(self, url: RemoteUrl, operation: Callable[[Any], _T]) -> _T:
        try:
            return operation(self._filesystem(url))
        except RemoteError:
            raise
        except Exception as error:
            if not self._anonymous and has_no_credentials(error):
                return self._call_anonymously(url, operation, error)
            raise self._failure(url, error) from None

    def _call_anonymously(self, url: RemoteUrl, operation: Callable[[Any], _T], without: Exception) -> _T:
        """Try to read a public bucket. If that is denied, the failure is the lack of credentials."""
        self._anonymous = True
        self._filesystems.clear()
        try:
            return operation(self._filesystem(url))
        except RemoteError:
            raise
        except PermissionError:
            self._anonymous = False
            self._filesystems.clear()
            raise failure_of(url, without) from None
        except Exception as error:
            raise self._failure(url, error) from None

    def _failure(self, url: RemoteUrl, error: Exception) -> RemoteError:
        """Return the error of an operation. A missing object may be one of a missing bucket."""
        if isinstance(error, FileNotFoundError) and url.path:
            try:
                self._filesystem(url).ls(url.container, detail=False)
            except FileNotFoundError:
                return RemoteError(
                    f"{url}: there is no bucket {url.container!r}; check its name, region and endpoint"
                )
            except Exception:
                # For instance, objects may be read but not listed. The first error stands.
                pass
        elif isinstance(error, FileNotFoundError):
            return RemoteError(
                f"{url}: there is no bucket {url.container!r}; check its name, region and endpoint"
            )
        return failure_of(url, error)

    def _filesystem(self, url: RemoteUrl) -> Any:
        versioned = url.version_id is not None
        if versioned not in self._filesystems:
            self._filesystems[versioned] = self._open_filesystem(url, self._anonymous)
        return self._filesystems[versioned]


def open_s3(url: RemoteUrl, anonymous: bool) -> Any:
    """Return a file system of S3, with the credentials, region and endpoint of the environment."""
    # Without caches, which would hide changes.
    return package("s3fs", "s3", url).S3FileSystem(
        anon=anonymous,
        version_aware=url.version_id is not None,
        config_kwargs=dict(_S3_CLIENT),
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def open_gcs(url: RemoteUrl, anonymous: bool) -> Any:
    """Return a file system of Google Cloud Storage, with the credentials of the environment."""
    # Not that of gcsfs itself, which asks by gRPC what kind of bucket it is, also where only HTTP is answered.
    return package("gcsfs.core", "gcs", url).GCSFileSystem(use_listings_cache=False, skip_instance_cache=True)


def _path(url: RemoteUrl) -> str:
    return f"{url.container}/{url.path}".rstrip("/")


def _version_of(url: RemoteUrl) -> dict[str, str]:
    return {} if url.version_id is None else {"version_id": url.version_id}


def _described(url: RemoteUrl, info: Mapping[str, Any]) -> RemoteFile:
    version = info.get("ETag") or info.get("etag") or info.get("generation")
    return RemoteFile(url, None if version is None else str(version), int(info.get("size") or 0))
