"""Files of a stand-in of Hugging Face's hub: revisions, commits, tokens, and what is refused."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import huggingface_hub
import pytest
from support.models import external, small
from support.remote.hub import FakeHub
from support.remote.web_server import Request, Response, WebServer

from tensorferry.server.models.remote.failures import RemoteError, UnreachableError
from tensorferry.server.models.remote.model_files import ModelFiles
from tensorferry.server.models.remote.stores import HubStore
from tensorferry.server.models.remote.url import parse_file, parse_repository
from tensorferry.server.onnx.graph import external_files


@pytest.fixture
def hub(plain_web: WebServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    monkeypatch.setenv("HF_TOKEN", "")
    return FakeHub(plain_web)


def files_of(hub: FakeHub, cache: Path) -> ModelFiles:
    return ModelFiles(cache, lambda url: HubStore(hub.server.url), external_files)


def test_a_model_and_its_weights_are_of_one_commit(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    body, data = external.scaled(tmp_path / "model.onnx", 3.0)
    commit = hub.commit("org/repo", {"onnx/model.onnx": body, "onnx/model.onnx_data": data})
    fetched = files_of(hub, cache).fetch(parse_file("hf://org/repo/onnx/model.onnx"))
    assert fetched.path.read_bytes() == body
    assert (fetched.path.parent / "model.onnx_data").read_bytes() == data
    first, *others = hub.server.requests
    assert first.path == "/org/repo/resolve/main/onnx/model.onnx"
    assert {request.path.split("/")[4] for request in others} == {commit}


def test_a_branch_is_followed_and_a_commit_is_not_asked_about(
    hub: FakeHub, cache: Path, tmp_path: Path
) -> None:
    old = small.twice(tmp_path / "a.onnx").read_bytes()
    new = small.echo(tmp_path / "b.onnx").read_bytes()
    files = files_of(hub, cache)
    commit = hub.commit("org/repo", {"m.onnx": old}, branch="v1")
    assert files.fetch(parse_file("hf://org/repo@v1/m.onnx")).path.read_bytes() == old
    hub.commit("org/repo", {"m.onnx": new}, branch="v1")
    assert files.fetch(parse_file("hf://org/repo@v1/m.onnx")).path.read_bytes() == new
    pinned = parse_file(f"hf://org/repo@{commit}/m.onnx")
    assert files.fetch(pinned).path.read_bytes() == old
    hub.server.requests.clear()
    assert files.fetch(pinned).path.read_bytes() == old
    assert not hub.server.requests


def test_a_redirect_to_plain_http_is_refused(web: WebServer, plain_web: WebServer, cache: Path) -> None:
    hub = FakeHub(web)
    hub.commit("org/repo", {"m.onnx": b"model"})
    serve = web.respond
    web.respond = lambda request: (
        serve(request)
        if request.method == "HEAD"
        else Response(status=302, headers={"Location": f"{plain_web.url}/m.onnx"})
    )
    # So that it reads SSL_CERT_FILE again.
    huggingface_hub.close_session()
    with pytest.raises(RemoteError, match=r"redirects to an address that is not https://"):
        files_of(hub, cache).fetch(parse_file("hf://org/repo/m.onnx"))
    huggingface_hub.close_session()
    assert not plain_web.requests


def test_the_token_is_sent_and_never_shown(
    hub: FakeHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("org/repo", {"m.onnx": small.twice(tmp_path / "a.onnx").read_bytes()})
    hub.token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(RemoteError, match=r"no repository 'org/repo', or it is private.*HF_TOKEN") as caught:
        files_of(hub, cache).fetch(parse_file("hf://org/repo/m.onnx"))
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert files_of(hub, cache).fetch(parse_file("hf://org/repo/m.onnx")).path.is_file()


def test_neither_tokens_nor_redirects_are_logged(
    hub: FakeHub,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Large files of a hub are on another host, at an address that is presigned."""
    body = small.twice(tmp_path / "a.onnx").read_bytes()
    commit = hub.commit("org/repo", {"m.onnx": body})
    serve = hub.server.respond

    def redirect(request: Request) -> Response:
        if request.path == "/elsewhere":
            return Response(body)
        assert request.headers["Authorization"] == "Bearer hf_token"
        headers = {
            "Location": f"{hub.server.url}/elsewhere?Signature=s3cr3t".replace("127.0.0.1", "localhost"),
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{hashlib.sha256(body).hexdigest()}"',
            "X-Linked-Size": str(len(body)),
        }
        return Response(status=302, headers=headers)

    hub.server.respond = redirect
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    caplog.set_level(logging.DEBUG)
    assert files_of(hub, cache).fetch(parse_file("hf://org/repo/m.onnx")).path.read_bytes() == body
    assert "Authorization" not in hub.server.requests[-1].headers
    assert "hf_token" not in caplog.text
    assert "s3cr3t" not in caplog.text
    hub.server.respond = serve


def test_what_is_missing_is_named(hub: FakeHub, cache: Path) -> None:
    hub.commit("org/repo", {"m.onnx": b"model"})
    hub.commit("org/gated", {"m.onnx": b"model"})
    hub.gated.add("org/gated")
    for address, said in [
        ("hf://org/repo/other.onnx", "there is no such file"),
        ("hf://org/repo@v9/m.onnx", "the repository 'org/repo' has no revision 'v9'"),
        ("hf://org/none/m.onnx", "there is no repository 'org/none', or it is private"),
        ("hf://org/gated/m.onnx", "access to this repository must be granted by its owners"),
    ]:
        with pytest.raises(RemoteError, match=said):
            files_of(hub, cache).fetch(parse_file(address))


def test_an_answer_without_a_commit_is_not_from_a_hub(hub: FakeHub, cache: Path) -> None:
    hub.server.respond = lambda request: Response(b"<html>", headers={"ETag": '"1"'})
    with pytest.raises(RemoteError, match=r"is not from a hub; check HF_ENDPOINT"):
        files_of(hub, cache).fetch(parse_file("hf://org/repo/m.onnx"))


def test_a_hub_that_is_gone_is_unreachable(hub: FakeHub, cache: Path) -> None:
    hub.server.close()
    with pytest.raises(UnreachableError, match=r"the host cannot be reached"):
        files_of(hub, cache).fetch(parse_file("hf://org/repo/m.onnx"))


def test_a_repository_of_models_is_listed_at_one_commit(hub: FakeHub) -> None:
    files = {"models/a/1/model.onnx": b"model", "models/a/config.pbtxt": b"", "README.md": b"text"}
    commit = hub.commit("org/repo", files)
    store = HubStore(hub.server.url)
    listed = store.list(parse_repository("hf://org/repo/models"))
    assert sorted(listed) == ["a/1/model.onnx", "a/config.pbtxt"]
    assert {file.url.revision for file in listed.values()} == {commit}
    assert sorted(store.list(parse_repository("hf://org/repo"))) == sorted(files)
