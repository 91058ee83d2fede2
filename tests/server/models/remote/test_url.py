"""Addresses of models: what is accepted, what identifies a file, and that secrets are not shown."""

from __future__ import annotations

import pytest

from tensorferry.server.errors import ConfigError
from tensorferry.server.models.remote.url import is_remote, parse_file, parse_repository, parse_url

HASH = "ab" * 32
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "container", "path", "revision", "name", "file"),
    [
        ("hf://org/repo/model.onnx", "org/repo", "model.onnx", "", "model", "model.onnx"),
        ("hf://org/repo@v1/onnx/model.onnx", "org/repo", "onnx/model.onnx", "v1", "model", "model.onnx"),
        ("hf://o/r@refs%2Fpr%2F1/m.onnx", "o/r", "m.onnx", "refs/pr/1", "m", "m.onnx"),
        ("gs://bucket/m.onnx", "bucket", "m.onnx", "", "m", "m.onnx"),
        ("HTTPS://host:8443/a/my%20model.onnx", "host:8443", "a/my%20model.onnx", "", "my model", "my_model.onnx"),
    ],
)  # fmt: skip
def test_an_address_has_a_place_and_a_name(
    text: str, container: str, path: str, revision: str, name: str, file: str
) -> None:
    url = parse_file(text)
    assert (url.container, url.path, url.revision) == (container, path, revision)
    assert (url.model_name, url.file_name) == (name, file)
    assert is_remote(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ftp://host/m.onnx", "the scheme 'ftp'; it must be one of hf, s3, gs, https, http"),
        ("https:///m.onnx", "must be https://HOST/model.onnx"),
        ("hf://org/m.onnx", "names no file"),
        ("s3://bucket/m.onnx?part=1", "s3:// can have only ?versionId="),
        ("https://host/a b.onnx", "is not the address of a model"),
        ("https://host/app.py", "is Python code"),
        ("https://host/m.onnx#sha256=12", "64 hexadecimal digits"),
        (f"https://host/m.onnx#md5={HASH}", "but not its own; add #sha256="),
    ],
)
def test_a_malformed_address_is_refused_with_what_is_expected(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_file(text)
    assert said in str(caught.value)


def test_a_repository_is_a_bucket_or_a_prefix_and_has_no_hash() -> None:
    with pytest.raises(ConfigError, match="https:// cannot list files"):
        parse_repository("https://host/models")
    with pytest.raises(ConfigError, match="can have neither a hash nor a version"):
        parse_repository(f"s3://bucket/models#sha256={HASH}")
    for elsewhere in ("s3://bucket/x/../../..", "hf://../..", "gs://bucket/a//b"):
        with pytest.raises(ConfigError, match="has a path that leads elsewhere"):
            parse_repository(elsewhere)
    assert parse_repository("s3://bucket").path == ""
    assert parse_repository("s3://bucket/models/").path == "models"
    assert parse_repository("hf://org/repo@v1").revision == "v1"


SECRETS = "https://user:hunter22@host/m.onnx?X-Amz-Signature=deadbeef&token=s3cr3t#sha256=" + HASH


def test_no_form_of_an_address_shows_its_secrets() -> None:
    url = parse_file(SECRETS)
    for shown in (str(url), repr(url), url.key, url.model_name, url.file_name):
        assert not any(secret in shown for secret in ("hunter22", "deadbeef", "s3cr3t"))
    assert str(url) == "https://host/m.onnx?..."


@pytest.mark.parametrize("bad", ["https://user:hunter22@host/app.py?token=s3cr3t", SECRETS + "0"])
def test_no_error_shows_secrets(bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_file(bad)
    assert not any(secret in str(caught.value) for secret in ("hunter22", "deadbeef", "s3cr3t"))


def test_a_librarys_text_is_shown_without_secrets() -> None:
    url = parse_file(SECRETS)
    text = "GET https://user:hunter22@host/m.onnx?X-Amz-Signature=deadbeef failed, token s3cr3t"
    assert url.without_secrets(text) == "GET https://host/m.onnx?... failed, token ..."


def test_what_identifies_a_file_is_not_its_signature_or_its_hash() -> None:
    plain = parse_file("https://host/m.onnx")
    assert plain.key == parse_file("https://host/m.onnx?X-Amz-Date=1&X-Amz-Signature=2").key
    assert plain.key == parse_file(f"https://host/m.onnx#sha256={HASH}").key
    others = [
        "https://host/n.onnx",
        "https://other/m.onnx",
        "https://host/m.onnx?id=7",
        "https://u@host/m.onnx",
    ]
    assert len({plain.key, *(parse_file(other).key for other in others)}) == 5


def test_only_a_commit_or_an_objects_version_is_immutable() -> None:
    assert parse_file(f"hf://org/repo@{COMMIT}/m.onnx").immutable
    assert parse_file("s3://bucket/m.onnx?versionId=v7").immutable
    assert not any(
        parse_file(text).immutable
        for text in ("hf://org/repo@main/m.onnx", "s3://bucket/m.onnx", "https://host/m.onnx?versionId=v7")
    )


def test_files_beside_a_model_have_its_host_and_their_own_pins() -> None:
    url = parse_file(f"https://u:p@host/a/m.onnx?sig=1#sha256={HASH}&m.onnx_data={'cd' * 32}")
    beside = url.beside("m.onnx_data")
    assert (beside.path, beside.query, beside.credentials, beside.pins) == (
        "a/m.onnx_data",
        "sig=1",
        "u:p",
        (),
    )
    assert (url.pin("m.onnx"), url.pin("m.onnx_data"), url.pin("other")) == (HASH, "cd" * 32, None)
    versioned = parse_file("s3://bucket/a/m.onnx?versionId=v7").beside("m.onnx_data")
    assert (versioned.path, versioned.version_id) == ("a/m.onnx_data", None)
    assert parse_url("s3://bucket/models").below("a/1/model.onnx").path == "models/a/1/model.onnx"
