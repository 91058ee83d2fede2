"""ONNX Runtime: a model on a device."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.batcher import StagedModel
from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.gpu import capture_lock
from tensorferry.server.gpu.cuda_graphs import CapturedShapes, GraphOptions
from tensorferry.server.gpu.pinned_memory import CudaDeviceMemory, DeviceMemory
from tensorferry.server.gpu.staged_session import StagedSession
from tensorferry.server.gpu.staging_buffers import (
    CaptureError,
    StagedBatch,
    StagingBuffers,
    array_of_ortvalue,
)
from tensorferry.server.gpu.tensor_layout import Shape
from tensorferry.server.onnx_graph.unknown_ranks import tensors_of_unknown_rank
from tensorferry.server.runtime.arena_shrinkage import ArenaShrinkage
from tensorferry.server.runtime.cuda_stream import create_stream, keep_until_closed, with_stream
from tensorferry.server.runtime.load_cures import remedy_for
from tensorferry.server.runtime.ort import onnxruntime
from tensorferry.server.runtime.ort_options import ARENA_SHRINKAGE, DEVICE_ALLOCATOR, TENSORRT, OrtOptions
from tensorferry.server.runtime.output_rows import with_output_rows
from tensorferry.server.runtime.providers import CUDA, Providers, capturing, providers_of
from tensorferry.server.runtime.sampling import describe_difference, random_array
from tensorferry.server.signature import Signature, TensorSpec, signature_of

_log = logging.getLogger("tensorferry.server")

Array = npt.NDArray[Any]

_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16
# Runs of one captured graph at a time, each with memory of its own: the batcher has two batches in flight.
_SLOTS = 2
# The number of a captured graph, in the options of a run; -1 for a run that is none.
_GRAPH_ID = "gpu_graph_id"

_GRAPH_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class Session:
    """A model loaded on a device. `run` may be called from several threads at once.

    StartError when the file cannot be loaded, or the device or a provider not be used.
    """

    def __init__(
        self,
        path: Path,
        device: str = "cpu",
        settings: OrtOptions = OrtOptions(),  # noqa: B008 (frozen)
        memory: DeviceMemory | None = None,
    ) -> None:
        self.path = path
        self.device = device
        self._settings = settings
        if not path.is_file():
            raise StartError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        providers = providers_of(device, settings)
        self._graphs = settings.graphs if device != "cpu" or memory is not None else None
        for name, _ in providers:
            if name not in onnxruntime.get_available_providers():
                raise StartError(
                    f"{path}: its configuration asks for {name}, which the installed onnxruntime does not have; it has "
                    f"{', '.join(onnxruntime.get_available_providers())}"
                )
        self._stream = create_stream(device, settings.priority, path)
        self._providers = providers if self._stream is None else with_stream(providers, self._stream)
        self._memory = memory
        self._start()

    def _start(self) -> None:
        """Loads the model, and makes ready for runs."""
        path, device = self.path, self.device
        self._session = self._open(self._providers)
        if self._stream is not None:
            keep_until_closed(self._session, self._stream)
        for name, _ in self._providers:
            if name not in self._session.get_providers():
                what = device if name == CUDA else name
                raise StartError(
                    f"{path}: ONNX Runtime could not use {what}; its log has the reason. Use --device cpu"
                )
        self._run_options = self._options_of_runs(-1)
        # On the CPU, with an arena that is not shrunk after each run anyway.
        self._shrinking_options: Any = None
        self._shrinkage: ArenaShrinkage | None = None
        if device == "cpu" and self._settings.memory_arena and not self._settings.arena_shrinkage:
            self._shrinking_options = self._options_of_runs(-1)
            self._shrinking_options.add_run_config_entry(ARENA_SHRINKAGE, "cpu:0")
            self._shrinkage = ArenaShrinkage(self._run_options, self._shrinking_options)
        try:
            inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
            shapeless = (
                tensors_of_unknown_rank(path) if any(not node.shape for node in [*inputs, *outputs]) else ()
            )
            optional = self._session.get_overridable_initializers()
            self.signature: Signature = signature_of(inputs, outputs, shapeless, optional)
        except StartError as error:
            raise StartError(f"{path}: {error}") from None
        self._outputs = [spec.name for spec in self.signature.outputs]
        signature = self.signature
        kinds = {spec.datatype.name for spec in signature.inputs + signature.outputs + signature.optional}
        # IO binding has no strings, and a plain run no bfloat16. On the CPU a plain run takes numpy's
        # arrays as they are, and costs less than a binding: a third, of one small row.
        self._plain = "BYTES" in kinds or (device == "cpu" and "BF16" not in kinds)
        # On the CPU: what `InferenceSession.run` calls once it has asked what cannot be here (missing inputs, say).
        self._direct: Callable[..., Sequence[Array]] | None = None
        if self._plain and device == "cpu" and self._memory is None:
            self._direct = getattr(self._session, "_sess", self._session).run
        # ONNX Runtime keeps the graphs that it captures by thread: all of a session's runs are on this one. It
        # ends when the session is dropped.
        self._thread: ThreadPoolExecutor | None = None
        if self._graphs is not None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tensorferry-graphs-{path.stem}")
        self._graph_options: dict[int, Any] = {}
        # The numbers of graphs that have run once.
        self._captured: set[int] = set()
        self.signature = with_output_rows(self.signature, self._run)
        self._staging: StagingBuffers | None = None
        if not self._plain and self._memory is None and device != "cpu":
            self._memory = _cuda_memory(device)
        if "BYTES" not in kinds and self._memory is not None:
            self._staging = StagingBuffers(
                self.signature, self._memory, self._session.io_binding, self._run_bound
            )

    def _open(self, providers: Providers) -> Any:
        """ONNX Runtime's session, for captured graphs where they are wanted and can be had."""
        with self._using():
            return self._opened(providers)

    def _opened(self, providers: Providers) -> Any:
        options = _options(self._settings)
        if self._graphs is not None and any(name == TENSORRT for name, _ in providers):
            self._without_graphs("TensorRT captures one graph alone, of one batch size")
        if self._graphs is not None:
            try:
                return _inference_session(self.path, options, capturing(providers))
            except Exception as error:
                self._without_graphs(_reason(error))
        try:
            return _inference_session(self.path, options, providers)
        except Exception as error:
            reason = _reason(error).rstrip(".")
            cure = remedy_for(self.path, reason)
            raise StartError(f"{self.path}: ONNX Runtime cannot load it: {reason}{cure}") from error

    def _without_graphs(self, reason: str) -> None:
        """Goes on without CUDA graphs, with a line in the log; StartError where the configuration asks for them."""
        if self._graphs is not None and self._graphs.required:
            raise StartError(
                f"{self.path}: its configuration asks for CUDA graphs (optimization.cuda.graphs), but it cannot be "
                f"captured: {reason}; leave that out"
            )
        _log.warning("%s is served without CUDA graphs: %s", self.path, reason)
        self._graphs = None

    def _options_of_runs(self, graph: int) -> Any:
        options = onnxruntime.RunOptions()
        # A run that fails is run again in halves and then reported once, by us.
        options.log_severity_level = 4
        if self._settings.arena_shrinkage:
            options.add_run_config_entry(ARENA_SHRINKAGE, self._settings.arena_shrinkage)
        # Also where there are no graphs: ONNX Runtime looks for it before every bound run, and takes ten times as long
        # where it finds nothing.
        options.add_run_config_entry(_GRAPH_ID, str(graph))
        return options

    @property
    def graphs(self) -> GraphOptions | None:
        """The CUDA graphs that are wanted, unless it is known that they cannot be had."""
        return self._graphs

    @property
    def staged(self) -> StagedModel | None:
        """The same as `run`, in steps, for a batcher that overlaps them; None where nothing is gained."""
        if self._staging is None:
            return None
        return StagedSession(self.signature, self._staging, self._compute, self.run, _failed)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Runs the model once; arrays in `storage` form (see `tensors`), BYTES as `str` objects.

        ModelFailedError when ONNX Runtime does not carry it out, with its own reason as cause.
        """
        try:
            if self._staging is None or (batch := self._staging.placed(inputs)) is None:
                return self._run(inputs)
            return self._run_staged(self._staging, batch)
        except Exception as error:
            raise _failed(error) from error

    def _run_staged(self, staging: StagingBuffers, batch: StagedBatch) -> dict[str, Array]:
        if not staging.load(batch):
            return self._run(batch)
        return staging.fetch(self._compute(staging, batch))

    def _compute(self, staging: StagingBuffers, batch: StagedBatch) -> StagedBatch:
        """Runs a batch that is loaded; returns it, or the one that stands for it, to be fetched."""
        try:
            staging.compute(batch)
            return batch
        except Exception as error:
            if not batch.layout.outputs or not re.search("shape|dimension", str(error)):
                raise
            # The file may declare of an output what does not hold.
            again = staging.placed(batch, outputs=False)
            if again is None or not staging.load(again):
                raise
            staging.compute(again)
            staging.forget_outputs()
            _log.warning(
                "%s declares shapes of its outputs that do not hold, so that their memory is not made in advance: %s",
                self.path,
                _reason(error),
            )
            return again

    def capture(self, rungs: Sequence[Mapping[str, Shape]], *, pads: bool) -> bool:
        """Captures a CUDA graph for batches of each of these shapes; from then on, such batches run as these.

        With `pads`, smaller ones are padded up to the next rung. Nothing else may run meanwhile. False, and a line
        in the log, when the model cannot be captured: all its batches then run without. StartError when its
        configuration asks for graphs.
        """
        if self._graphs is None:
            return False
        try:
            if self._staging is None:
                raise CaptureError(_why_not_staged(self._plain))
            for number, shapes in enumerate(rungs):
                graphs = [number * _SLOTS + slot + 1 for slot in range(_SLOTS)]
                self._graph_options.update((graph, self._options_of_runs(graph)) for graph in graphs)
                self._staging.capture(shapes, graphs, lambda shapes=shapes: self._prove(shapes))  # type: ignore[misc]
        except Exception as error:
            self.go_without_graphs(
                str(error) if isinstance(error, (CaptureError, TimeoutError)) else _reason(error)
            )
            return False
        self._staging.use_captured(CapturedShapes(rungs, pads=pads))
        return True

    def go_without_graphs(self, reason: str) -> None:
        """Loads the model again, as if CUDA graphs had never been asked for; as `capture` when it cannot."""
        self._without_graphs(reason)
        self._start()

    def _prove(self, shapes: Mapping[str, Shape]) -> None:
        """Captures a graph of these shapes, and holds what it says of other inputs against a run without."""
        assert self._staging is not None
        generator = np.random.default_rng(0)
        for _ in range(2):
            inputs = {
                spec.name: random_array(spec.datatype, shapes[spec.name], generator)
                for spec in self.signature.inputs
            }
            batch = self._staging.placed(inputs)
            if batch is None or not self._staging.load(batch):
                raise CaptureError("there is no memory for its batches")
            self._staging.compute(batch)
            answers = self._staging.fetch(batch)
        expected = self._run(inputs)
        for spec in self.signature.outputs:
            difference = describe_difference(spec, expected[spec.name], answers[spec.name])
            if difference:
                raise CaptureError(f"captured, its output {spec.name!r} is another: {difference}")

    def end_runs(self) -> None:
        """Has whatever runs now, and is run from now on, fail at the next of the model's nodes.

        A captured graph has none: it runs to its end.
        """
        self._terminate(True)

    def allow_runs(self) -> None:
        """Runs are carried out again."""
        self._terminate(False)

    def _terminate(self, value: bool) -> None:
        for options in (self._run_options, self._shrinking_options, *self._graph_options.values()):
            if options is not None:
                options.terminate = value

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        options = self._run_options if self._shrinkage is None else self._shrinkage.options()
        if self._direct is not None:
            outputs = self._direct(self._outputs, inputs, options)
            return dict(zip(self._outputs, outputs, strict=True))
        if self._plain:
            with self._using():
                outputs = self._session.run(self._outputs, inputs, options)
            return dict(zip(self._outputs, outputs, strict=True))
        return self._run_in_callers_memory(inputs)

    def _run_in_callers_memory(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        signature = self.signature
        binding = self._session.io_binding()
        with self._using():
            # What is bound is copied to the device here.
            for spec in signature.with_given_inputs(inputs).inputs:
                binding.bind_ortvalue_input(spec.name, _to_ort(inputs[spec.name], spec))
        for spec in signature.outputs:
            binding.bind_output(spec.name, "cpu")
        self._run_bound(binding, None)
        values = binding.get_outputs()
        return {
            spec.name: array_of_ortvalue(value, spec)
            for spec, value in zip(signature.outputs, values, strict=True)
        }

    def _run_bound(self, binding: Any, graph: int | None) -> None:
        if graph is None:
            options, using = self._run_options, self._using()
        else:
            options = self._graph_options[graph]
            using = self._using() if graph in self._captured else capture_lock.CUDA.capturing()
        with using:
            if self._thread is None:
                self._session.run_with_iobinding(binding, options)
            else:
                self._thread.submit(self._session.run_with_iobinding, binding, options).result()
        if graph is not None:
            self._captured.add(graph)

    def _using(self) -> AbstractContextManager[None]:
        return nullcontext() if self.device == "cpu" else capture_lock.CUDA.using()


def _failed(error: Exception) -> ModelFailedError:
    return ModelFailedError(f"the model failed on this request: {_run_reason(error)}")


def _cuda_memory(device: str) -> DeviceMemory | None:
    try:
        return CudaDeviceMemory(int(device.partition(":")[2]))
    except StartError as error:
        _log.warning("batches for %s do not go through page-locked memory: %s", device, error)
        return None


def _why_not_staged(plain: bool) -> str:
    if plain:
        return "strings are not on the device"
    return "there is no page-locked memory for its batches"


def _inference_session(path: Path, options: Any, providers: Providers) -> Any:
    # A fallback would serve from the CPU what was to run elsewhere, and say so on stdout alone.
    return onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=0)


def _options(settings: OrtOptions) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    # Spinning workers take the cores that the transport needs while no batch runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # It raises its errors too, and those go to our log.
    options.log_severity_level = 4
    options.graph_optimization_level = _GRAPH_LEVELS[settings.graph]
    # By default ONNX Runtime makes a thread for each core of the machine, and binds it there,
    # even where the process may use only some of them.
    allowed = len(os.sched_getaffinity(0))
    if settings.intra_op_threads:
        options.intra_op_num_threads = settings.intra_op_threads
    elif allowed < (os.cpu_count() or allowed):
        options.intra_op_num_threads = allowed
    if settings.inter_op_threads:
        options.inter_op_num_threads = settings.inter_op_threads
    if settings.parallel:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = settings.memory_arena
    options.enable_mem_pattern = settings.memory_pattern
    if settings.device_allocator:
        options.add_session_config_entry(DEVICE_ALLOCATOR, settings.device_allocator)
    return options


def _to_ort(array: Array, spec: TensorSpec) -> Any:
    if spec.datatype.name == "BF16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _reason(error: Exception) -> str:
    """ONNX Runtime's message on one line, without the code in front."""
    return " ".join(re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error)).split())


def _run_reason(error: Exception) -> str:
    """What a client may read of a failed run: the node and the reason, never a place in the source."""
    text = _reason(error).removeprefix("Error in execution: ")
    node = re.search(r"while running (\S+) node", text)
    reason = text.rpartition("Status Message: ")[2]
    if re.search(r"\.(cc|cu|cpp|h|hpp)\b|/", reason):
        reason = "the server's log has the reason"
    return f"{node[1]} node: {reason}" if node else reason
