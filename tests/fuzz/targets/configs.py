"""Model configurations in every form, model files, and loading and unloading by clients.

Everything is real except ONNX Runtime: a stand-in session has a signature and copies its inputs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from fuzz.target import ANSWERED, FindingError, Shape, Target, code_of, timed
from fuzz.targets.methods import MethodsTarget
from fuzz.world import WORDS
from google.protobuf import json_format, text_format
from support.models import small
from support.server.rig import spec

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import ServerError, StartError
from tensorferry.server.methods import repository
from tensorferry.server.methods.repository import RepositoryMethods
from tensorferry.server.models.config_pbtxt.pbtxt import config_text, parse_config, read_config
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelState
from tensorferry.server.models.lifecycle.stages import make_batcher
from tensorferry.server.models.repository.labels import read_labels
from tensorferry.server.models.repository.repository import Repository
from tensorferry.server.models.repository.repository_control import RepositoryController
from tensorferry.server.onnx.graph import value_dependent_nodes
from tensorferry.server.onnx.loading import preparation
from tensorferry.server.onnx.loading.preparation import PreparedModel
from tensorferry.server.onnx.loading.warmup_samples import warmup_samples
from tensorferry.server.runtime.files.onnx_file import string_lists
from tensorferry.server.signature import Signature
from tensorferry.server.transport.threaded_servicer import Extension

_SIGNATURE = Signature(
    (spec("x", "FP32", "batch", 3), spec("n", "INT64", "batch", "k")),
    (spec("x_out", "FP32", "batch", 3), spec("n_out", "INT64", "batch", "k")),
)
_OPTIONS = ServerConfig((ModelSource("m", Path("m.onnx")),))
# Fewer instances than such a configuration asks for, because each takes threads.
_MOST_INSTANCES = 4
# Models of the repository that clients load and unload.
_OWN = ("good", "other", "sent", "broken")

GOOD = """
name: "m" backend: "onnxruntime" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }
input { name: "n" data_type: TYPE_INT64 dims: [ -1 ] reshape { shape: [ -1 ] } }
output { name: "x_out" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" }
output { name: "n_out" data_type: TYPE_INT64 dims: [ -1 ] }
dynamic_batching {
  preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 priority_levels: 3 default_priority_level: 2
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1000 max_queue_size: 8 }
  priority_queue_policy { key: 1 value { allow_timeout_override: true } }
}
instance_group { count: 2 kind: KIND_CPU }
version_policy { specific { versions: [ 1, 2 ] } }
optimization { graph { level: 1 } execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
model_warmup {
  name: "w" batch_size: 2 count: 1
  inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 random_data: true } }
  inputs { key: "n" value { data_type: TYPE_INT64 dims: 2 zero_data: true } }
}
model_warmup { name: "f" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 input_data_file: "x" } } }
"""
_OTHERS = (
    "",
    "max_batch_size: 4",
    'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3 ] } version_policy { all { } }',
    "max_batch_size: 4 sequence_batching { }",
    "max_batch_size: 4 dynamic_batching { }",
    'model_operations { op_library_filename: [ "model.onnx", "../../ops.so" ] }',
    'platform: "onnxruntime_onnx" version_policy { latest { num_versions: 2 } } default_model_filename: "other.onnx"',
    'optimization { cuda { graphs: true graph_spec { batch_size: 1 } } } parameters { key: "fp16" value { } }',
    "max_batch_size: 99999999999999999999",
    "# nothing\n name: 'm",
    'instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0 ] }, { kind: KIND_AUTO } ] model_transaction_policy { }',
)  # fmt: skip


class _Session:
    """The part of a Session that preparing a model uses."""

    device = "cpu"
    op_libraries = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.signature = _SIGNATURE
        self.batch_memory = None

    def limit_memory(self) -> None:
        """Do nothing: its batches are small."""

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{name}_out": np.array(array) for name, array in inputs.items()}


class _File:
    def __init__(self, path: Path) -> None:
        self.source = self.path = path

    def session(self, device: str, settings: Any) -> _Session:
        if not self.path.is_file():
            raise StartError(f"{self.path} is not there")
        assert not settings.op_libraries, "a library was loaded, although there is none"
        return _Session(self.path)


class _WithoutRuntime:
    """Prepares models over sessions that copy."""

    def __init__(self) -> None:
        self._patch = mock.patch.object(
            preparation, "model_file", lambda source, fp16, scratch: _File(source)
        )
        self._patch.start()

    def prepare(self, source: ModelSource, options: ServerConfig = _OPTIONS) -> Model:
        """Run `load_model` on a configuration, up to a running batcher."""
        with ExitStack() as scratch:
            prepared: PreparedModel = preparation.prepare_model(source, options, "cpu", scratch)
        signature, settings = prepared.io_mapping.signature, prepared.settings
        warmup_samples(prepared.config, signature, source.directory)
        labels = read_labels(prepared.config, source.directory)
        run = prepared.io_mapping.runner(prepared.session.run)
        functions = [run] * min(_MOST_INSTANCES, len(settings.devices))
        batcher = make_batcher(source.name, settings, functions, options)
        return Model(
            source.name, source.version, signature, settings.max_batch_size, "", batcher,
            config=prepared.config, labels=labels,
        )  # fmt: skip

    def close(self) -> None:
        self._patch.stop()


_NAMES = (
    *WORDS, "m", "x", "n", "x_out", "n_out", "labels.txt", "../labels.txt", "model.onnx", "TYPE_FP32", "openvino", "onnxruntime",
    "onnxruntime_onnx", "tensorflow", "cuda", "tensorrt", "precision_mode", "FP16", "KIND_CPU", "intra_op_thread_count",
    "inter_op_thread_count", "execution_mode", "fp16", "fp16_except", "fp16_tolerance", "enable_mem_arena", "gpu_mem_limit",
    "arena_extend_strategy", "cudnn_conv_algo_search", "-1", "1", "warm",
)  # fmt: skip


class ConfigTarget(Target):
    """A configuration as text, JSON or message, up to the batcher that it asks for."""

    name = "config"
    words: Sequence[str] = _NAMES

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "m"
        (self._directory / "1").mkdir(parents=True)
        (self._directory / "warmup").mkdir()
        (self._directory / "warmup" / "x").write_bytes(bytes(12))
        (self._directory / "labels.txt").write_text("zero\none\n")
        (directory / "labels.txt").write_text("outside\n")
        self._path = small.echo(self._directory / "1" / "model.onnx")
        self._text = self._directory / "config.pbtxt"
        self._without = _WithoutRuntime()
        self._name = "m"

    def seeds(self) -> Sequence[bytes]:
        texts = (GOOD, *_OTHERS)
        made = [bytes([0]) + text.encode() for text in texts]
        for text in texts:
            try:
                message = text_format.Parse(text, ModelConfig())
            except text_format.ParseError:
                continue
            made.append(bytes([1]) + json_format.MessageToJson(message).encode())
            made.append(bytes([2]) + message.SerializeToString(deterministic=True))
        return made

    def shape(self, data: bytes) -> Shape:
        front = data[:1] or b"\0"
        return Shape(front, ModelConfig if front[0] % 3 == 2 else None)

    def run(self, data: bytes) -> str:
        front, _ = self.shape(data)
        with timed():
            try:
                config = self._read(front[0] % 3, data[1:])
                source = ModelSource(self._name, self._path, "1", config, self._directory)
                model = self._without.prepare(source)
            except StartError as error:
                if not str(error):
                    raise FindingError("a refusal that says nothing") from error
                return "refused"
            except ServerError as error:
                return code_of(error)
            # The error that a client gets.
            pb.ModelConfigResponse(config=model.config).SerializeToString()
            str(model)
            if not model.batcher.close():
                raise FindingError("a worker did not end")
        return ANSWERED

    def _read(self, form: int, data: bytes) -> ModelConfig:
        if form == 0:
            self._text.write_bytes(data)
            return read_config(self._text)
        if form == 1:
            return repository._config(data.decode(errors="replace"), self._name)
        try:
            message = ModelConfig.FromString(data)
        except Exception:
            raise StartError("no message") from None
        text = config_text(message)
        again = parse_config(text, "text")
        if config_text(again) != text:
            raise FindingError(f"read again it is another one: {text}")
        return again

    def close(self) -> None:
        self._without.close()


class FilesTarget(Target):
    """Parts of a model's file that are read before ONNX Runtime loads it."""

    name = "files"
    words: Sequence[str] = WORDS

    def __init__(self, directory: Path) -> None:
        self._path = directory / "model.onnx"

    def seeds(self) -> Sequence[bytes]:
        made = []
        for build in (small.echo, small.mlp, small.conv, small.centred, small.running_sum):
            made.append(build(self._path).read_bytes())
        return made

    def shape(self, data: bytes) -> Shape:
        import onnx

        return Shape(b"", onnx.ModelProto)

    def run(self, data: bytes) -> str:
        self._path.write_bytes(data)
        with timed():
            lists = string_lists(self._path)
            if len(lists) > 16 or any(len(words) > 64 for words in lists):
                raise FindingError("more words than it may remember")
            return "not steady" if value_dependent_nodes(self._path) else "steady"


_TWO_ROWS = '{"max_batch_size": 2}'


def _with(message: Any, **parameters: object) -> Any:
    """Return the message with parameters, each of its value's kind."""
    kinds = {bool: "bool_param", str: "string_param", bytes: "bytes_param"}
    for name, value in parameters.items():
        setattr(message.parameters[name], kinds[type(value)], value)
    return message


class RepositoryTarget(MethodsTarget):
    """RepositoryIndex, RepositoryModelLoad and RepositoryModelUnload over a real directory of models."""

    name = "repository"
    words: Sequence[str] = (*_NAMES, "good", "other", "broken", "config", "file:1/model.onnx", "file:../x", "file:1/../../x",
             "unload_dependents", "file:2/deep/model.onnx", '{"max_batch_size": 2}', "{}", '{"name": "other"}',
             '{"model_operations": {"op_library_filename": ["model.onnx"]}}')  # fmt: skip
    called = ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "ModelConfig")
    good: ClassVar[Sequence[tuple[str, Any]]] = (
        ("RepositoryIndex", pb.RepositoryIndexRequest()),
        ("RepositoryIndex", pb.RepositoryIndexRequest(ready=True)),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="good")),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="broken")),
        ("RepositoryModelLoad", _with(pb.RepositoryModelLoadRequest(model_name="other"), config=_TWO_ROWS)),
        (
            "RepositoryModelLoad",
            _with(
                pb.RepositoryModelLoadRequest(model_name="sent"),
                config="{}",
                **{"file:1/model.onnx": b"onnx"},
            ),
        ),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="good")),
        (
            "RepositoryModelUnload",
            _with(pb.RepositoryModelUnloadRequest(model_name="sent"), unload_dependents=True),
        ),
    )

    def __init__(self, directory: Path) -> None:
        self._root, self._sent, inside = directory / "models", directory / "sent", directory / "world"
        self._sent.mkdir()
        inside.mkdir()
        for version in ("good/1", "good/2", "other/1", "broken/1"):
            (self._root / version).mkdir(parents=True)
            small.echo(self._root / version / "model.onnx")
        (self._root / "broken" / "config.pbtxt").write_text("no configuration")
        self._files = _listed(directory)
        self._directory = directory
        # Where uploaded files are kept.
        self._tempdir, tempfile.tempdir = tempfile.tempdir, str(self._sent)
        self._without = _WithoutRuntime()
        self._count = 0
        super().__init__(inside)

    def extensions(self, directory: Path) -> Sequence[Extension]:
        registry = self.world.registry
        self._control = RepositoryController(
            registry,
            Repository([self._root]),
            self._load,
            lambda name: self.service.models_changed(),
            mode="explicit",
            poll_seconds=1.0,
        )
        self._control.start((), (), strict=True)
        return (RepositoryMethods(registry, self._control),)

    def _load(self, source: ModelSource) -> Model:
        if source.keep_alive is None or source.path.is_file():
            return self._without.prepare(source)
        raise StartError(f"{source.path} was not sent")

    def afterwards(self) -> None:
        self._count += 1
        if self._count % 64 == 0:
            self.check()

    def check(self) -> None:
        super().check()
        for entry in self.world.registry.entries():
            # A model that is already unloading has nothing more to unload.
            if entry.name in _OWN and entry.state is ModelState.READY:
                self._control.unload(entry.name)
        own = {path for path in _listed(self._directory) if not path.is_relative_to(self._sent)}
        outside = own - self._files - {self._directory / "world" / "key"}
        if outside:
            raise FindingError(f"files were made outside of where they belong: {outside}")

    def close(self) -> None:
        tempfile.tempdir = self._tempdir
        self._without.close()
        if not self._control.close(20.0):
            raise FindingError("models do not end")
        if left := _listed(self._sent):
            raise FindingError(f"files that clients sent are left behind: {left}")
        super().close()


def _listed(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()}
