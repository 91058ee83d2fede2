"""Objects of a real S3 server, and of a stand-in for Google Cloud Storage."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from support.remote.s3_server import S3Server, client_variables
from support.remote.web_server import Request, Response, WebServer, web_server

from tensorferry.server.models.remote.download import Fetch, RemoteFile
from tensorferry.server.models.remote.failures import RemoteError, UnreachableError
from tensorferry.server.models.remote.model_files import ModelFiles
from tensorferry.server.models.remote.stores import BucketStore, stores
from tensorferry.server.models.remote.url import parse_file, parse_repository
from tensorferry.server.system.install_command import install_command

BODY = bytes(range(256)) * 10


def fetched(cache: Path, address: str) -> bytes:
    files = ModelFiles(cache, stores(allow_http=False), lambda path: ())
    return files.fetch(parse_file(address)).path.read_bytes()


def listed(address: str) -> Mapping[str, RemoteFile]:
    url = parse_repository(address)
    return Fetch(stores(allow_http=False)(url)).list(url)


@pytest.fixture
def bucket(s3: S3Server, request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    """A bucket of this test, and a file system to fill it."""
    name = re.sub(r"[^a-z0-9]", "-", request.node.name.lower())[-40:].strip("-")
    files = s3.files()
    files.mkdir(name)
    yield name, files
    files.rm(name, recursive=True)


def test_a_session_token_is_not_logged(
    bucket: tuple[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name, files = bucket
    files.pipe_file(f"{name}/m.onnx", BODY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "s3cr3t-session")
    caplog.set_level(logging.DEBUG)
    assert fetched(cache, f"s3://{name}/m.onnx") == BODY
    assert "s3cr3t-session" not in caplog.text
    assert "Signature=" not in caplog.text


def test_a_version_of_an_object_can_be_named(bucket: tuple[str, Any], cache: Path) -> None:
    name, files = bucket
    files.call_s3("put_bucket_versioning", Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    old = files.call_s3("put_object", Bucket=name, Key="m.onnx", Body=b"old")["VersionId"]
    files.call_s3("put_object", Bucket=name, Key="m.onnx", Body=b"newer")
    assert fetched(cache, f"s3://{name}/m.onnx") == b"newer"
    assert fetched(cache, f"s3://{name}/m.onnx?versionId={old}") == b"old"


def test_missing_objects_and_buckets_are_told_apart(bucket: tuple[str, Any], cache: Path) -> None:
    name, files = bucket
    files.pipe_file(f"{name}/folder/m.onnx", BODY)
    for address, said in [
        (f"s3://{name}/other.onnx", "there is no such file"),
        (f"s3://not-{name}/m.onnx", f"there is no bucket 'not-{name}'; check its name, region and endpoint"),
        (f"s3://{name}/folder", "is a prefix of objects, not an object"),
    ]:
        with pytest.raises(RemoteError, match=said):
            fetched(cache, address)
    with pytest.raises(RemoteError, match=rf"there is no bucket 'not-{name}'"):
        listed(f"s3://not-{name}/models")
    assert listed(f"s3://{name}/nothing") == {}


def test_a_list_has_all_objects_below_a_prefix_and_no_others(bucket: tuple[str, Any]) -> None:
    name, files = bucket
    for key in ("models/a/1/model.onnx", "models/a/config.pbtxt", "models2/b/1/model.onnx", "top"):
        files.pipe_file(f"{name}/{key}", key.encode())
    assert sorted(listed(f"s3://{name}/models")) == ["a/1/model.onnx", "a/config.pbtxt"]
    assert len(listed(f"s3://{name}")) == 4


def test_a_public_object_needs_no_credentials(
    bucket: tuple[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, files = bucket
    files.pipe_file(f"{name}/m.onnx", BODY)
    files.call_s3("put_object_acl", Bucket=name, Key="m.onnx", ACL="public-read")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    assert fetched(cache, f"s3://{name}/m.onnx") == BODY


def test_credentials_of_fsspecs_own_configuration_are_used(
    bucket: tuple[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, files = bucket
    files.pipe_file(f"{name}/m.onnx", BODY)
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    with pytest.raises(RemoteError, match="permission denied"):
        fetched(cache, f"s3://{name}/m.onnx")
    monkeypatch.setitem(
        import_module("fsspec.config").conf, "s3", {"key": "AKIATESTTESTTEST", "secret": "a-secret"}
    )
    assert fetched(cache, f"s3://{name}/m.onnx") == BODY


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A server whose answers a test gives, in place of S3."""
    with web_server(None) as server:
        for name, value in client_variables(server.url).items():
            monkeypatch.setenv(name, value)
        yield server


def denied(code: str, status: int = 403) -> Response:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
    return Response(body.encode(), status, {"Content-Type": "application/xml"})


def test_denied_objects_are_described_without_the_key(
    scripted: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter22")
    scripted.respond = lambda request: denied("AccessDenied")
    with pytest.raises(RemoteError, match=r"s3://bucket/m.onnx: permission denied") as caught:
        fetched(cache, "s3://bucket/m.onnx")
    assert "set AWS_PROFILE, or AWS_ACCESS_KEY_ID" in str(caught.value)
    assert "hunter22" not in str(caught.value)
    scripted.respond = lambda request: denied("InvalidAccessKeyId")
    with pytest.raises(RemoteError, match=r"permission denied \(InvalidAccessKeyId\)"):
        listed("s3://bucket/models")


def test_without_credentials_a_private_object_asks_for_them(
    scripted: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    scripted.respond = lambda request: denied("AccessDenied")
    with pytest.raises(RemoteError, match=r"permission denied; .* or there are none: set AWS_PROFILE"):
        fetched(cache, "s3://bucket/m.onnx")


def test_a_server_of_s3_that_is_gone_is_unreachable(
    scripted: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter22")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    scripted.close()
    with pytest.raises(UnreachableError, match=r"s3://bucket/m.onnx: the host cannot be reached"):
        fetched(cache, "s3://bucket/m.onnx")


class FakeStorage:
    """The methods of Google Cloud Storage's JSON API that gcsfs uses to read and list."""

    def __init__(self, server: WebServer) -> None:
        self.objects: dict[str, bytes] = {}
        server.respond = self._respond

    def _respond(self, request: Request) -> Response:
        match = re.fullmatch(r"(/download)?/storage/v1/b/bucket/o(?:/(.+))?", request.path)
        if match is None or (match[2] and match[2] not in self.objects):
            return _json({"error": {"message": "none", "code": 404}}, 404)
        if match[1]:
            return Response(self.objects[match[2]])
        if match[2]:
            return _json(self._entry(match[2]))
        (prefix,) = parse_qs(request.query).get("prefix", [""])
        return _json({"items": [self._entry(name) for name in self.objects if name.startswith(prefix)]})

    def _entry(self, name: str) -> dict[str, str]:
        body = self.objects[name]
        time = "2026-01-01T00:00:00.000Z"
        return {"name": name, "etag": "tag", "size": str(len(body)), "updated": time, "timeCreated": time}


def _json(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value).encode(), status, {"Content-Type": "application/json"})


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStorage]:
    """A stand-in that gcsfs finds by its environment, and uses without credentials."""
    with web_server(None) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield FakeStorage(server)


def anonymous_gcs(*flags: object) -> Any:
    from gcsfs import core

    return core.GCSFileSystem(token="anon", use_listings_cache=False, skip_instance_cache=True)


def test_objects_of_google_are_fetched_and_listed(gcs: FakeStorage, cache: Path) -> None:
    gcs.objects |= {"models/a/1/model.onnx": BODY, "models/a/config.pbtxt": b"name: 'a'", "top": b""}
    store = BucketStore(anonymous_gcs)
    files = ModelFiles(cache, lambda url: store, lambda path: ())
    model = files.fetch(parse_file("gs://bucket/models/a/1/model.onnx")).path
    assert model.read_bytes() == BODY
    assert sorted(store.list(parse_repository("gs://bucket/models"))) == ["a/1/model.onnx", "a/config.pbtxt"]
    with pytest.raises(RemoteError, match=r"there is no such file"):
        files.fetch(parse_file("gs://bucket/none.onnx"))


@pytest.mark.parametrize(
    ("address", "extra"), [("hf://org/repo/m.onnx", "hf"), ("s3://b/m.onnx", "s3"), ("gs://b/m.onnx", "gcs")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    address: str, extra: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("huggingface_hub", "s3fs", "gcsfs.core"):
        # As an import finds it if it is not installed.
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RemoteError, match=f"is missing, which .* needs: {re.escape(install_command(extra))}"):
        fetched(cache, address)


_PROGRAM = """
import sys
import tensorferry.server.app, tensorferry.server.cli.inspect, tensorferry.server.cli.serve, tensorferry.server.cli.show_config
packages = ("aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "huggingface_hub", "s3fs")
sys.exit(", ".join(name for name in packages if name in sys.modules))
"""


def test_no_package_of_an_extra_is_imported_unless_it_is_used() -> None:
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert ended.stderr.strip() == ""
