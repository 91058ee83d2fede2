"""What the server's own options add to a model's options for ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.gpu.cuda_graphs import GraphOptions, GraphSpec
from tensorferry.server.runtime.ort_options import ExecutionProvider, OrtOptions

_TENSORRT = "TensorrtExecutionProvider"


def tuned(own: OrtOptions, options: ServerConfig, name: str) -> OrtOptions:
    """The options of a model, `name`, whose configuration asks for `own`; what is there counts before the server's."""
    graphs = own.graphs
    if graphs is None and options.cuda_graphs is not None:
        graphs = GraphOptions(tuple(map(GraphSpec, sorted(set(options.cuda_graphs)))))
    return replace(own, graphs=graphs, gpu=tuple(_cached(provider, options, name) for provider in own.gpu))


def _cached(provider: ExecutionProvider, options: ServerConfig, name: str) -> ExecutionProvider:
    """TensorRT with a place for the engines that it builds, which takes minutes."""
    if provider.name != _TENSORRT or options.tensorrt_cache is None:
        return provider
    folder = str(options.tensorrt_cache / name)
    cache = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": folder,
    }
    return ExecutionProvider(provider.name, tuple(sorted({**cache, **dict(provider.options)}.items())))
