"""Callers without the role `control` see reasons without paths of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from support.server.rig import PATIENCE, Make
from support.server.tokens import METHODS, TOKENS, bearer

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.models.lifecycle.public_reasons import without_paths


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("/srv/models/m/1/model.onnx: cut off", "m/1/model.onnx: cut off"),
        ("the model repository '/srv/models' is gone", "the model repository '...' is gone"),
        ("/srv/my models/m/config.pbtxt has no name", "m/config.pbtxt has no name"),
        ("libcudart.so: /usr/lib/libc.so.6, (/opt/x) and /a", "libcudart.so: ..., (...) and ..."),
        ("Load model from /home/of somebody/m.onnx failed:/x", "Load model from ... somebody/m.onnx failed:..."),
        ("1/2 of a/b, and/or FP16", "1/2 of a/b, and/or FP16"),
    ],
)  # fmt: skip
def test_paths_below_the_roots_become_relative_and_others_are_hidden(reason: str, shown: str) -> None:
    assert without_paths(reason, [Path("/srv/models"), Path("/srv/my models")]) == shown


def test_absolute_paths_of_relative_roots_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert without_paths(f"{tmp_path}/models/m/1 is gone", [Path("models")]) == "m/1 is gone"


def test_each_role_sees_its_reasons(start: Make, tokens: Path, tmp_path: Path) -> None:
    """One model cannot be loaded, and the configuration of another cannot be read."""
    root = tmp_path / "of the server" / "models"
    broken = root / "broken" / "1" / "model.onnx"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no model")
    unreadable = root / "unreadable" / "config.pbtxt"
    unreadable.parent.mkdir()
    unreadable.write_text("batch: 1")
    app = start(
        auth_tokens=tokens,
        model_repositories=(root,),
        model_control="explicit",
        load_models=("*",),
        exit_on_error=False,
    )
    with grpc.insecure_channel(app.address) as channel:

        def call(method: str, request: Any, roles: str) -> bytes:
            asked: Any = channel.unary_unary(METHODS[method])
            answer: bytes = asked(
                request.SerializeToString(), timeout=PATIENCE, metadata=bearer(TOKENS[roles])
            )
            return answer

        def reasons(roles: str) -> list[str]:
            answer = call("RepositoryIndex", pb.RepositoryIndexRequest(), roles)
            return [
                entry.reason for entry in pb.RepositoryIndexResponse.FromString(answer).models if entry.reason
            ]

        in_full, public = reasons("infer,control"), reasons("infer")
        assert len(in_full) == len(public) == 2
        assert all(str(root) in reason for reason in in_full)
        assert not any(str(tmp_path) in reason or "of the server" in reason for reason in public)
        assert any("broken/1/model.onnx" in reason for reason in public)
        for method, request in (
            ("ModelInfer", pb.ModelInferRequest(model_name="broken")),
            ("ModelMetadata", pb.ModelMetadataRequest(name="broken")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(method, request, "infer")
            error: Any = caught.value
            assert "broken/1/model.onnx" in error.details()
            assert str(tmp_path) not in error.details()
