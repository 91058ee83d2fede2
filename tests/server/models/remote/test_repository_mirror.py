"""Repositories elsewhere as directories of this machine: what appears, what is fetched, and what stays the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import pytest

from tensorferry.server.errors import StartError
from tensorferry.server.models.remote import repository_mirror
from tensorferry.server.models.remote.download import RemoteFile
from tensorferry.server.models.remote.failures import RemoteError, UnreachableError
from tensorferry.server.models.remote.repository_mirror import RepositoryMirror
from tensorferry.server.models.remote.url import RemoteUrl, parse_repository
from tensorferry.server.models.repository.labels import read_labels
from tensorferry.server.models.repository.repository import Repository, RepositoryError

URL = parse_repository("s3://bucket/models")


class Store:
    """A bucket in memory. `read` has the names of what was read."""

    def __init__(self, **files: str) -> None:
        self.files = {name: text.encode() for name, text in files.items()}
        self.names: list[str] = []
        self.reachable = True

    def describe(self, url: RemoteUrl) -> RemoteFile:
        raise NotImplementedError

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        if not self.reachable:
            raise UnreachableError(f"{url}: the host cannot be reached")
        return {
            name: RemoteFile(url.below(name), hashlib.md5(body).hexdigest(), len(body))
            for name, body in self.files.items()
        }

    def read(self, file: RemoteFile, output: FileIO) -> None:
        if not self.reachable:
            raise UnreachableError(f"{file.url}: the host cannot be reached")
        name = file.url.path.removeprefix("models/")
        self.names.append(name)
        output.write(self.files[name])


def mirrored(store: Store, cache: Path, *, allow_code: bool = False) -> Repository:
    mirror = RepositoryMirror(URL, cache, lambda url: store, allow_code=allow_code)
    repository = Repository([mirror])
    repository.refresh()
    return repository


@pytest.fixture
def store() -> Store:
    store = Store()
    store.files = {
        "a/config.pbtxt": b"max_batch_size: 4",
        "a/labels.txt": b"one",
        "a/1/model.onnx": b"first",
        "a/2/model.onnx": b"second",
        "a/2/model.onnx_data": b"weights",
        "b/3/model.onnx": b"of b",
        "README.md": b"text",
    }
    return store


def test_only_versions_that_are_served_are_fetched(store: Store, cache: Path) -> None:
    repository = mirrored(store, cache)
    assert repository.names() == ["a", "b"]
    assert store.names == []
    (version,) = repository.versions("a")
    assert version.source.version == "2"
    assert version.source.path.read_bytes() == b"second"
    assert (version.source.path.parent / "model.onnx_data").read_bytes() == b"weights"
    assert version.source.config is not None
    assert version.source.config.max_batch_size == 4
    assert sorted(store.names) == ["a/2/model.onnx", "a/2/model.onnx_data", "a/config.pbtxt", "a/labels.txt"]
    assert "s3:/bucket/models/a/2/model.onnx" in str(version.source.path)


def test_a_changed_file_changes_the_fingerprint_of_its_version_alone(store: Store, cache: Path) -> None:
    store.files["a/config.pbtxt"] = b"version_policy { all {} }"
    repository = mirrored(store, cache)
    before = {version.source.version: version.fingerprint for version in repository.versions("a")}
    store.files["a/2/model.onnx_data"] = b"other weights"
    store.names.clear()
    assert repository.versions("a")[1].fingerprint == before["2"]
    repository.refresh()
    after = {version.source.version: version.fingerprint for version in repository.versions("a")}
    assert after["1"] == before["1"]
    assert after["2"] != before["2"]
    assert store.names == ["a/2/model.onnx_data"]


def test_a_host_that_is_gone_leaves_what_is_in_the_cache(
    store: Store, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = mirrored(store, cache)
    running.versions("a")
    store.reachable = False
    running.refresh()
    assert "the copy in the cache is used, which may be outdated" in caplog.text
    started = mirrored(store, cache)
    assert started.names() == ["a"]
    assert started.versions("a")[0].source.path.read_bytes() == b"second"
    assert running.names() == ["a", "b"]
    with pytest.raises(UnreachableError):
        running.versions("b")


@pytest.mark.parametrize("remains", [b"wei", None])
def test_a_file_that_was_damaged_in_the_cache_is_fetched_again(
    store: Store, cache: Path, remains: bytes | None
) -> None:
    repository = mirrored(store, cache)
    weights = (repository.versions("a")[0].source.path.parent / "model.onnx_data").resolve()
    weights.unlink()
    if remains is not None:
        weights.write_bytes(remains)
    store.names.clear()
    repository = mirrored(store, cache)
    (version,) = repository.versions("a")
    assert (version.source.path.parent / "model.onnx_data").read_bytes() == b"weights"
    assert version.source.path.read_bytes() == b"second"
    assert store.names == ["a/2/model.onnx_data"]


def test_without_a_cache_a_host_that_is_gone_is_an_error(store: Store, cache: Path) -> None:
    store.reachable = False
    with pytest.raises(UnreachableError):
        mirrored(store, cache)


def test_a_broken_fetch_leaves_the_version_as_it_was(store: Store, cache: Path) -> None:
    repository = mirrored(store, cache)
    (before,) = repository.versions("a")
    store.files["a/2/model.onnx"] = b"newer"
    repository.refresh()
    store.reachable = False
    with pytest.raises(RemoteError):
        repository.versions("a")
    assert before.source.path.read_bytes() == b"second"


def test_a_model_that_was_removed_goes_from_the_cache(store: Store, cache: Path) -> None:
    repository = mirrored(store, cache)
    (version,) = repository.versions("b")
    tree = version.source.path.resolve().parent
    del store.files["b/3/model.onnx"]
    # Another process does not remove what this one serves.
    mirrored(store, cache)
    assert tree.is_dir()
    repository.refresh()
    del version
    repository.refresh()
    assert not tree.exists()


def test_a_fetch_reads_what_is_known_of_its_part_alone(
    store: Store, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a look at a repository of 1,000 models takes minutes."""
    repository = mirrored(store, cache)
    for name in ("a", "b"):
        repository.versions(name)
    (record,) = cache.glob("*/parts/b/record.json")
    record.write_text("{")
    repository.versions("a")
    assert "is damaged" not in caplog.text
    repository.versions("b")
    assert "is damaged" in caplog.text


def test_directories_of_other_models_that_only_a_marker_shows(store: Store, cache: Path) -> None:
    store.files["ensemble/config.pbtxt"] = b"platform: 'ensemble'"
    store.files["ensemble/1/"] = b""
    repository = mirrored(store, cache)
    (version,) = repository.versions("ensemble")
    assert version.source.version == "1"


@pytest.mark.parametrize(
    "name", ["../out/1/model.onnx", "/etc/1/model.onnx", "a//proc/file", "a/2//proc/file"]
)
def test_names_that_lead_elsewhere_are_not_fetched(
    store: Store, cache: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.files[name] = b"bad"
    repository = mirrored(store, cache)
    assert repository.names() == ["a", "b"]
    repository.versions("a")
    assert name not in store.names
    assert "it is not fetched" in caplog.text


def test_code_is_fetched_only_if_the_operator_allows_it(store: Store, cache: Path) -> None:
    store.files["p/1/model.py"] = b"code"
    store.files["a/2/export.py"] = b"code"
    refused = mirrored(store, cache)
    with pytest.raises(RemoteError, match=r"s3://bucket/models/p/1/model.py is code.*--allow-remote-code"):
        refused.versions("p")
    assert not (refused.versions("a")[0].source.path.parent / "export.py").exists()
    allowed = mirrored(store, cache, allow_code=True)
    assert allowed.versions("p")[0].source.path.read_bytes() == b"code"
    assert (allowed.versions("a")[0].source.path.parent / "export.py").exists()


def test_a_configuration_elsewhere_chooses_no_library(store: Store, cache: Path) -> None:
    store.files["a/config.pbtxt"] = b'model_operations { op_library_filename: "/usr/lib/evil.so" }'
    with pytest.raises(RepositoryError, match=r"has the library '/usr/lib/evil.so'.*--allow-remote-code"):
        mirrored(store, cache).versions("a")
    assert mirrored(store, cache, allow_code=True).versions("a")


def test_labels_are_read_from_a_repository_elsewhere(store: Store, cache: Path) -> None:
    store.files["a/config.pbtxt"] = b"output { name: 'y' label_filename: 'labels.txt' }"
    repository = mirrored(store, cache)
    (source,) = [version.source for version in repository.versions("a")]
    assert read_labels(source.config, source.directory) == {"y": ("one",)}
    assert source.config is not None
    source.config.output[0].label_filename = "../a/labels.txt"
    with pytest.raises(StartError, match="outside of the model's directory"):
        read_labels(source.config, source.directory)


def test_a_list_without_end_is_refused(store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository_mirror, "MOST_FILES", len(store.files) - 1)
    with pytest.raises(
        RemoteError, match=rf"s3://bucket/models lists more than {len(store.files) - 1} files"
    ):
        mirrored(store, cache)
