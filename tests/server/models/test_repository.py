"""A repository in Triton's layout has models and versions, and detects changes of their files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from google.protobuf import text_format

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.models.config_pbtxt.pbtxt import read_config
from tensorferry.server.models.repository import repository
from tensorferry.server.models.repository.repository import Repository, RepositoryError


def add(root: Path, name: str, *versions: str, config: str | None = None, file: str = "model.onnx") -> Path:
    home = root / name
    home.mkdir(exist_ok=True)
    for version in versions:
        (home / version).mkdir()
        (home / version / file).write_text("weights")
    if config is not None:
        (home / "config.pbtxt").write_text(config)
    return home


def numbers(root: Path, name: str = "m", config: ModelConfig | None = None) -> list[str]:
    return [version.source.version for version in Repository([root]).versions(name, config)]


def fingerprints(root: Path) -> list[object]:
    return [version.fingerprint for version in Repository([root]).versions("m")]


def test_every_directory_with_a_valid_name_is_a_model(tmp_path: Path) -> None:
    for name in ("b", "a.b-c_1", "ä", ".git", "lost+found"):
        (tmp_path / name).mkdir()
    (tmp_path / "README").write_text("not a model")
    (tmp_path / "b" / "7").mkdir()
    assert Repository([tmp_path]).names() == ["a.b-c_1", "b"]
    assert Repository([tmp_path]).empty_roots() == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("digits.onnx", "other.onnx"), ": it has {}/digits.onnx, {}/other.onnx; name a file itself"),
        (
            ("1/model.onnx", "2/model.onnx"),
            ": it is a model of a repository; give --model-repository {parent}",
        ),
        ((), ""),
    ],
)
def test_a_directory_that_is_not_a_repository_has_no_models_and_a_reason(
    tmp_path: Path, files: tuple[str, ...], message: str
) -> None:
    root, full = tmp_path / "root", tmp_path / "full"
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("")
    root.mkdir(exist_ok=True)
    full.mkdir()
    add(full, "m", "1")
    repository = Repository([root, full])
    assert repository.names() == ["m"]
    (reason,) = repository.empty_roots()
    said = message.replace("{parent}", str(tmp_path)).replace("{}", str(root))
    assert reason == (
        f"the model repository {root} has no model, NAME/VERSION/model.onnx with a number of at least 1 as VERSION{said}"
    )


def test_the_parent_of_a_model_is_named_also_from_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(add(tmp_path, "m", "1"))
    (reason,) = Repository([Path()]).empty_roots()
    assert reason.endswith(f"give --model-repository {tmp_path}")


def test_several_repositories_are_combined(tmp_path: Path) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    for root, name in zip(roots, ("b", "a"), strict=True):
        root.mkdir()
        add(root, name, "1")
    repository = Repository(roots)
    assert repository.names() == ["a", "b"]
    assert repository.versions("a")[0].source.path == roots[1] / "a" / "1" / "model.onnx"
    add(roots[0], "a", "1")
    with pytest.raises(
        RepositoryError, match="model 'a' is not unique across the model repositories"
    ) as caught:
        repository.versions("a")
    assert f"{roots[0] / 'a'} and {roots[1] / 'a'}" in str(caught.value)


def test_a_model_that_is_removed_while_it_is_read_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path, "m", "1")
    (tmp_path / "m" / "config.pbtxt").write_text("")

    def removing(path: Path) -> ModelConfig:
        result = read_config(path)
        shutil.rmtree(tmp_path / "m")
        return result

    monkeypatch.setattr(repository, "read_config", removing)
    assert Repository([tmp_path]).versions("m") == ()


def test_a_missing_model_has_no_versions(tmp_path: Path) -> None:
    assert Repository([tmp_path]).versions("m") == ()
    assert Repository([tmp_path]).versions("../m") == ()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["9", "10"]),
        ("version_policy { all { } }", ["1", "9", "10"]),
        ("version_policy { specific { versions: [9, 1, 9, 3] } }", ["1", "9"]),
    ],
)
def test_the_version_policy(tmp_path: Path, policy: str | None, expected: list[str]) -> None:
    home = add(tmp_path, "m", "1", "9", "10", config=policy)
    for name in ("0", "01", "11.old", "-2", "v3", "٣"):
        (home / name).mkdir()
    (home / "12").write_text("a file")
    assert numbers(tmp_path) == expected


@pytest.mark.parametrize(
    ("versions", "policy"),
    [((), None), (("0", "01"), None), (("1", "2"), "version_policy { specific { versions: 3 } }")],
)
def test_a_policy_that_selects_no_version_is_an_error(
    tmp_path: Path, versions: tuple[str, ...], policy: str | None
) -> None:
    add(tmp_path, "m", *versions, config=policy)
    with pytest.raises(
        RepositoryError, match="at least one version must be available under the version policy"
    ):
        numbers(tmp_path)


def test_a_different_name_in_the_config_is_an_error(tmp_path: Path) -> None:
    home = add(tmp_path, "m", "1", config="name: 'other'")
    with pytest.raises(
        RepositoryError, match="has the name 'other'; it must be that of its directory, 'm'"
    ) as caught:
        numbers(tmp_path)
    assert str(home / "config.pbtxt") in str(caught.value)


def test_default_model_filename_may_be_a_file_or_a_directory(tmp_path: Path) -> None:
    home = add(tmp_path, "m", "1", config="default_model_filename: 'other.onnx'", file="other.onnx")
    assert Repository([tmp_path]).versions("m")[0].source.path == home / "1" / "other.onnx"
    home = add(tmp_path, "large")
    (home / "1" / "model.onnx").mkdir(parents=True)
    (home / "1" / "model.onnx" / "model.onnx").write_text("weights")
    source = Repository([tmp_path]).versions("large")[0].source
    assert source.path == home / "1" / "model.onnx" / "model.onnx"


@pytest.mark.parametrize("file", ["../../secret.onnx", "/secret.onnx", "a\0b"])
def test_a_file_name_outside_the_version_is_refused(tmp_path: Path, file: str) -> None:
    """Clients that may load models can send a configuration."""
    add(tmp_path, "m", "1")
    with pytest.raises(RepositoryError, match=r"default_model_filename is '.*'; it must be a file"):
        numbers(tmp_path, config=ModelConfig(default_model_filename=file))


@pytest.mark.parametrize("path", ["2/weights.bin", "2/deep/weights.bin", "config.pbtxt", "warmup/x.raw"])
def test_a_changed_version_has_another_fingerprint(tmp_path: Path, path: str) -> None:
    """A file outside of the versions changes all of them."""
    home = add(tmp_path, "m", "1", "2", config="version_policy { all { } }")
    before = fingerprints(tmp_path)
    (home / path).parent.mkdir(exist_ok=True)
    (home / path).write_text("version_policy { all { } } # now with a remark")
    after = fingerprints(tmp_path)
    same = [old == new for old, new in zip(before, after, strict=True)]
    assert same == [path.startswith("2/"), False]


def test_a_changed_file_of_the_same_size_is_detected(tmp_path: Path) -> None:
    home = add(tmp_path, "m", "1")
    before = fingerprints(tmp_path)
    status = (home / "1" / "model.onnx").stat()
    (home / "new").write_text("WEIGHTS")
    os.utime(home / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (home / "new").rename(home / "1" / "model.onnx")
    assert fingerprints(tmp_path) != before


def test_a_config_that_is_replaced_while_it_is_read_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = add(tmp_path, "m", "1", config="max_batch_size: 4")

    def replacing(path: Path) -> ModelConfig:
        result = read_config(path)
        (home / "new").write_text("max_batch_size: 16")
        (home / "new").rename(path)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(repository, "read_config", replacing)
        (before,) = Repository([tmp_path]).versions("m")
    (after,) = Repository([tmp_path]).versions("m")
    configs = (before.source.config, after.source.config)
    assert [config and config.max_batch_size for config in configs] == [4, 16]
    assert before.fingerprint != after.fingerprint


def test_an_empty_configuration_differs_from_none(tmp_path: Path) -> None:
    """It has the default of every field, and replaces the file."""
    add(tmp_path, "m", "1", config="max_batch_size: 4")
    (sent,) = Repository([tmp_path]).versions("m", ModelConfig())
    assert [sent.fingerprint] != fingerprints(tmp_path)


def test_a_link_that_leads_nowhere_is_no_file(tmp_path: Path) -> None:
    """Emacs makes one beside a file that is edited."""
    home = add(tmp_path, "m", "1")
    before = fingerprints(tmp_path)
    (home / ".#config.pbtxt").symlink_to("user@host.1234:1700000000")
    assert fingerprints(tmp_path) == before


def test_a_link_to_a_parent_directory_is_not_followed(tmp_path: Path) -> None:
    home = add(tmp_path, "m", "1")
    (home / "1" / "again").symlink_to(home)
    assert fingerprints(tmp_path) == fingerprints(tmp_path)


LIBRARY = 'model_operations { op_library_filename: "ops.so" }'
OF_TENSORRT = (
    'optimization {{ execution_accelerators {{ gpu_execution_accelerator {{ name: "tensorrt" '
    'parameters {{ key: "{}" value: "plugin.so" }} }} }} }}'
)
PLUGIN, DECRYPTION = map(OF_TENSORRT.format, ("trt_extra_plugin_lib_paths", "trt_engine_decryption_lib_path"))


@pytest.mark.parametrize("text", [LIBRARY, PLUGIN, DECRYPTION], ids=["operators", "plugin", "decryption"])
def test_a_client_names_only_libraries_that_the_operator_has_named(tmp_path: Path, text: str) -> None:
    """A library is code, so no client can choose one among the files of the server or those that it sends."""
    given = text_format.Parse(text, ModelConfig())
    home = add(tmp_path, "m", "1", config=text)
    assert numbers(tmp_path, config=given) == ["1"]
    for operators in ("max_batch_size: 4", text.replace(".so", ".so.2")):
        (home / "config.pbtxt").write_text(operators)
        with pytest.raises(RepositoryError) as caught:
            numbers(tmp_path, config=given)
        assert str(caught.value) == (
            f"the configuration in the request has the library {text.split(chr(34))[-2]!r}, which {home}/config.pbtxt "
            "does not have; a client cannot choose libraries: leave it out, or let the operator name it there"
        )
    (home / "config.pbtxt").unlink()
    with pytest.raises(RepositoryError, match="the configuration in the request has the library"):
        numbers(tmp_path, config=given)
