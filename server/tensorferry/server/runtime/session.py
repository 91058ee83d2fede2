"""Session: a model that ONNX Runtime has loaded on a device."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt

from tensorferry.server.errors import ModelFailedError, StartError
from tensorferry.server.onnx.graph.model_file import tensors_of_unknown_rank
from tensorferry.server.runtime.checks.sampling import describe_difference, random_array
from tensorferry.server.runtime.checks.trial_runs import is_loading, trial_run
from tensorferry.server.runtime.files.load_remedies import remedy_for
from tensorferry.server.runtime.files.op_libraries import OpLibrary
from tensorferry.server.runtime.files.output_rows import with_output_rows
from tensorferry.server.runtime.gpu import capture_lock
from tensorferry.server.runtime.gpu.cuda_graphs import CapturedShapes, GraphOptions
from tensorferry.server.runtime.gpu.pinned_memory import DeviceMemory, create_stream, keep_until_closed
from tensorferry.server.runtime.gpu.staged_session import StagedSession
from tensorferry.server.runtime.gpu.staging_buffers import CaptureError, StagingBuffers, array_of_ortvalue
from tensorferry.server.runtime.gpu.tensor_layout import ONNX_BFLOAT16, Shape
from tensorferry.server.runtime.host_memory import BatchMemory
from tensorferry.server.runtime.ort import onnxruntime, ort_message
from tensorferry.server.runtime.ort_options import ARENA_SHRINKAGE, TENSORRT, OrtOptions
from tensorferry.server.runtime.providers import (
    CUDA,
    Providers,
    names_in_sessions,
    open_session,
    providers_of,
    session_options,
    with_option,
)
from tensorferry.server.signature import Signature, TensorSpec, signature_of

_log = logging.getLogger("tensorferry.server")

Array = npt.NDArray[Any]

# Slots of each captured shape. Two, because the batcher has two batches in flight.
_SLOTS = 2
# An arena on the CPU keeps the memory of the largest batch, so one run in this many seconds shrinks it when it ends. The
# next run must allocate its memory again: one of 4,096 rows then took 1.7 times as long; no effect was seen for runs
# below a millisecond.
_SHRINK_SECONDS = 60.0
# Run option with the number of a captured graph; -1 for a run without one.
_GRAPH_ID = "gpu_graph_id"


class Session:
    """Model loaded on a device. `run` is thread-safe.

    StartError if the file cannot be loaded, or if the device or a provider cannot be used.
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
        # Libraries of custom operators that the session has registered.
        self.op_libraries: Sequence[OpLibrary] = settings.op_libraries
        # Requested CUDA graphs; None if there are none or they turned out to be impossible.
        self.graphs: GraphOptions | None = settings.graphs if device != "cpu" or memory is not None else None
        # Refuses batches that are not expected to fit into the memory of the CPU; None if each batch is run.
        self.batch_memory: BatchMemory | None = None
        for name, _ in providers:
            if not set(names_in_sessions(name)) <= set(onnxruntime.get_available_providers()):
                raise StartError(
                    f"{path}: its configuration requires {name}, which the installed onnxruntime does not have; it has "
                    f"{', '.join(onnxruntime.get_available_providers())}"
                )
        self._stream = create_stream(device, settings.kernels_first, path)
        if self._stream is not None:
            stream = str(self._stream.address)
            providers = with_option(providers, (CUDA, TENSORRT), "user_compute_stream", stream)
        self._providers = providers
        self._memory = memory
        self._start()

    def _start(self) -> None:
        """Load the model and prepare its runs."""
        path, device = self.path, self.device
        with self._using():
            self._session = self._open(self._providers)
        if self._stream is not None:
            keep_until_closed(self._session, self._stream)
        for name, _ in self._providers:
            if not set(names_in_sessions(name)) & set(self._session.get_providers()):
                what = device if name == CUDA else name
                raise StartError(
                    f"{path}: ONNX Runtime could not use {what}; its log has the reason. Use --device cpu"
                )
        self._run_options = self._options_of_runs(-1)
        # Needed only for an arena on the CPU that is not shrunk after every run. `_shrink_at` is the time of the next run
        # that shrinks it.
        self._shrinking_options: Any = None
        self._shrink_at = math.inf
        if device == "cpu" and self._settings.memory_arena and not self._settings.arena_shrinkage:
            self._shrinking_options = self._options_of_runs(-1)
            self._shrinking_options.add_run_config_entry(ARENA_SHRINKAGE, "cpu:0")
            self._shrink_at = time.monotonic() + _SHRINK_SECONDS
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
        # IO binding does not support strings, and a plain run not bfloat16. On the CPU a plain run takes numpy arrays
        # directly and is a third faster than a binding for one small row.
        self._plain = "BYTES" in kinds or (device == "cpu" and "BF16" not in kinds)
        # The function behind `InferenceSession.run`, without checks that always pass here, such as missing inputs.
        self._direct: Callable[..., Sequence[Array]] | None = None
        if self._plain and device == "cpu" and self._memory is None:
            self._direct = getattr(self._session, "_sess", self._session).run
        # ONNX Runtime stores captured graphs per thread, so all runs of the session are on this thread. It ends with
        # the session.
        self._thread: ThreadPoolExecutor | None = None
        if self.graphs is not None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tensorferry-graphs-{path.stem}")
        self._graph_options: dict[int, Any] = {}
        # Numbers of the graphs that have been captured.
        self._captured: set[int] = set()
        self.signature = with_output_rows(self.signature, partial(self._tried, self._run))
        self._staging: StagingBuffers | None = None
        if not self._plain and self._memory is None and device != "cpu":
            self._memory = _cuda_memory(device)
        if "BYTES" not in kinds and self._memory is not None:
            # Weak, because a dropped session in a cycle of references would keep its device memory until the next
            # collection, and for ever if it was made before the server froze its objects. Callers hold the session.
            run_bound: Callable[[], Any] = WeakMethod(self._run_bound)
            self._staging = StagingBuffers(
                path,
                self.signature,
                self._memory,
                self._session.io_binding,
                lambda binding, graph: run_bound()(binding, graph),
            )

    def nodes_by_provider(self) -> Mapping[str, Mapping[str, int]]:
        """Return the number of nodes of each operator, by the provider that runs them.

        Empty if all run on ONNX Runtime's own CPU provider, or if ONNX Runtime is too old to say.
        """
        placed: dict[str, Counter[str]] = {}
        assignments = getattr(self._session, "get_provider_graph_assignment_info", None)
        if assignments is not None and len(self._providers) > 1:
            for part in assignments():
                placed.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
        return placed

    def _open(self, providers: Providers) -> Any:
        """Create ONNX Runtime's session, with CUDA graphs if they are requested and possible."""
        if self.graphs is not None and any(name == TENSORRT for name, _ in providers):
            self._without_graphs("TensorRT captures one graph alone, of one batch size")
        if self.graphs is not None:
            options = session_options(self._settings, self.device)
            try:
                capturing = with_option(providers, (CUDA,), "enable_cuda_graph", "1")
                return open_session(self.path, options, capturing, self.device)
            except Exception as error:
                self._without_graphs(ort_message(error))
        # Others, because those may have the providers of the failed session.
        options = session_options(self._settings, self.device)
        try:
            return open_session(self.path, options, providers, self.device)
        except Exception as error:
            reason = ort_message(error).rstrip(".")
            remedy = remedy_for(self.path, reason, self._settings.op_libraries)
            raise StartError(f"{self.path}: ONNX Runtime cannot load it: {reason}{remedy}") from error

    def _without_graphs(self, reason: str) -> None:
        """Continue without CUDA graphs, with a warning. StartError if the configuration requires them."""
        if self.graphs is not None and self.graphs.required:
            raise StartError(
                f"{self.path}: its configuration requires CUDA graphs (optimization.cuda.graphs), but it cannot be "
                f"captured: {reason}; leave that out"
            )
        _log.warning("%s is served without CUDA graphs: %s", self.path, reason)
        self.graphs = None

    def _options_of_runs(self, graph: int) -> Any:
        options = onnxruntime.RunOptions()
        # ONNX Runtime logs nothing, because the server retries a failed batch in halves and reports it once.
        options.log_severity_level = 4
        if self._settings.arena_shrinkage:
            options.add_run_config_entry(ARENA_SHRINKAGE, self._settings.arena_shrinkage)
        # Set without graphs too: ONNX Runtime looks it up before every bound run, and a failed look-up takes ten times
        # as long.
        options.add_run_config_entry(_GRAPH_ID, str(graph))
        return options

    def limit_memory(self) -> None:
        """Fail batches on the CPU that are not expected to fit into its memory, as a device would."""
        inputs = [spec.name for spec in self.signature.inputs if spec.has_row_axis]
        if self.device == "cpu" and inputs:
            self.batch_memory = BatchMemory(inputs[0])

    @property
    def builds_engines(self) -> bool:
        """Whether the first run of a size takes long, because TensorRT builds an engine."""
        return any(name == TENSORRT for name, _ in self._providers)

    @property
    def staged(self) -> StagedSession | None:
        """The session in steps, which a batcher can overlap; None if there are no staging buffers."""
        if self._staging is None:
            return None
        return StagedSession(self.signature, self._staging, self.run, _model_failure)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model once. Arrays are in `storage` form (see `tensors`), BYTES as `str` objects.

        ModelFailedError if the run fails, with ONNX Runtime's exception as cause.
        """
        return self._tried(self._run_once, inputs) if is_loading() else self._run_once(inputs)

    def _run_once(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        try:
            if self._direct is not None:
                options = self._run_options
                if (now := time.monotonic()) >= self._shrink_at:
                    # Two concurrent runs may both shrink the arena, which is harmless.
                    self._shrink_at, options = now + _SHRINK_SECONDS, self._shrinking_options
                memory = self.batch_memory
                if memory is not None and (rows := len(inputs[memory.input])) > memory.rows:
                    outputs = memory.run(rows, partial(self._direct, self._outputs, inputs, options))
                else:
                    outputs = self._direct(self._outputs, inputs, options)
                return dict(zip(self._outputs, outputs, strict=True))
            staging = self._staging
            if staging is None or (batch := staging.place_copies(inputs)) is None:
                return self._run(inputs)
            if not staging.load(batch):
                return self._run(batch)
            return staging.fetch(staging.compute_or_repeat(batch))
        except Exception as error:
            raise _model_failure(error) from error

    def _tried(
        self, run: Callable[[Mapping[str, Array]], dict[str, Array]], inputs: Mapping[str, Array]
    ) -> dict[str, Array]:
        return trial_run(partial(run, inputs), self.path.name, inputs, self.end_runs)

    def capture(self, captured: Sequence[Mapping[str, Shape]], *, pads: bool) -> bool:
        """Capture a CUDA graph for each of these input shapes, and use the graphs for batches from then on.

        With `pads`, a smaller batch is padded to the next captured shape. Nothing else may run meanwhile. Returns False
        and logs a warning if the model cannot be captured. StartError if its configuration requires graphs.
        """
        if self.graphs is None:
            return False
        reason: str | None = None
        try:
            if self._staging is None:
                missing = "there is no page-locked memory for its batches"
                raise CaptureError("strings are not on the device" if self._plain else missing)
            for number, shapes in enumerate(captured):
                graphs = [number * _SLOTS + slot + 1 for slot in range(_SLOTS)]
                self._graph_options.update((graph, self._options_of_runs(graph)) for graph in graphs)
                self._staging.capture(shapes, graphs, lambda shapes=shapes: self._check_captured(shapes))  # type: ignore[misc]
            self._staging.use_captured(CapturedShapes(captured, pads=pads))
        except Exception as error:
            reason = str(error) if isinstance(error, (CaptureError, TimeoutError)) else ort_message(error)
        if reason is not None:
            # After the error, whose traceback holds batches in the device's memory.
            self.go_without_graphs(reason)
        return reason is None

    def go_without_graphs(self, reason: str) -> None:
        """Load the model again without CUDA graphs. StartError if its configuration requires them."""
        self._without_graphs(reason)
        # The device need not hold both.
        self._session = self._staging = None
        self._start()

    def _check_captured(self, shapes: Mapping[str, Shape]) -> None:
        """Capture a graph of these shapes, and compare its outputs for other inputs with a plain run."""
        assert self._staging is not None
        generator = np.random.default_rng(0)
        for _ in range(2):
            inputs = {
                spec.name: random_array(spec, shapes[spec.name], generator) for spec in self.signature.inputs
            }
            batch = self._staging.place_copies(inputs)
            if batch is None or not self._staging.load(batch):
                raise CaptureError("there is no memory for its batches")
            self._staging.compute(batch)
            answers = self._staging.fetch(batch)
        expected = self._run(inputs)
        for spec in self.signature.outputs:
            difference = describe_difference(spec, expected[spec.name], answers[spec.name])
            if difference:
                raise CaptureError(f"captured, its output {spec.name!r} differs: {difference}")

    def end_runs(self) -> None:
        """Make current and future runs fail at the model's next node. A captured graph still runs to its end."""
        self._terminate(True)

    def allow_runs(self) -> None:
        """Permit runs again."""
        self._terminate(False)

    def _terminate(self, value: bool) -> None:
        for options in (self._run_options, self._shrinking_options, *self._graph_options.values()):
            if options is not None:
                options.terminate = value

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._plain:
            with self._using():
                outputs = self._session.run(self._outputs, inputs, self._run_options)
            return dict(zip(self._outputs, outputs, strict=True))
        return self._run_in_callers_memory(inputs)

    def _run_in_callers_memory(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        signature = self.signature
        binding = self._session.io_binding()
        with self._using():
            # Binding copies the inputs to the device.
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


def _model_failure(error: Exception) -> ModelFailedError:
    return ModelFailedError(f"the model failed on this request: {_run_reason(error)}")


def _cuda_memory(device: str) -> DeviceMemory | None:
    try:
        return DeviceMemory(int(device.partition(":")[2]))
    except StartError as error:
        _log.warning("batches on %s are not staged in page-locked memory: %s", device, error)
        return None


def _to_ort(array: Array, spec: TensorSpec) -> Any:
    if spec.datatype.name == "BF16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _run_reason(error: Exception) -> str:
    """Return what clients may see of a failed run: the node and the reason, but no source location."""
    text = ort_message(error).removeprefix("Error in execution: ")
    node = re.search(r"while running (\S+) node", text)
    reason = text.rpartition("Status Message: ")[2]
    if re.search(r"\.(cc|cu|cpp|h|hpp)\b|/", reason):
        reason = "the server's log has the reason"
    return f"{node[1]} node: {reason}" if node else reason
