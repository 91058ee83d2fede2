"""The commands and code that tests/docs does not run, with the reasons, by page and beginning."""

from __future__ import annotations

TOOLS = "it needs tools of other languages; tests/wire runs it where `make tools` has built them"
CLUSTER = "it needs a cluster; tests/deploy checks the files"

# The reason for each beginning of a command, by page.
COMMANDS: dict[str, dict[str, str]] = {
    "docs/guides/clients.md": {
        **dict.fromkeys(
            ("mkdir ferry", "go ", "P=", "PATH=", "npm ", "mvn ", "chmod ", "lib/protoc", "java",
             "tests/wire/perf_analyzer.sh", "LD_LIBRARY_PATH="),
            TOOLS,
        ),
    },
    "docs/guides/load_testing.md": {
        "tensorferry bench 127.0.0.1:8001 digits --find-rate": "it takes a minute; test_bench.py runs a short one",
    },
    "docs/guides/kubernetes.md": {
        "docker ": "it needs Docker and a registry; test_kubernetes_page.py checks the Dockerfile and the folders",
        "helm upgrade ": "it needs a cluster; test_kubernetes_page.py renders the same values",
        **dict.fromkeys(
            ("helm rollback ", "kubectl create ", "kubectl rollout ", "kubectl port-forward "), CLUSTER
        ),
        "kubectl run ": "it needs a cluster; test_kubernetes_page.py runs the container's command",
        "kubectl apply ": "it needs a cluster; test_kubernetes_page.py builds the same folder",
    },
    "docs/guides/operations.md": {
        "docker run ": "it needs Docker and the image",
        "kubectl rollout ": CLUSTER,
    },
    "docs/guides/serving.md": {
        "tensorferry config digits --config c.toml": "c.toml names a model of the reader's",
    },
    "docs/guides/security.md": {
        "kustomize build mine": "tests/deploy builds it where `make tools` has built kustomize",
        "tensorferry token web --file mine/tokens": "the line before; it needs the page's directory",
    },
}  # fmt: skip

# Blocks of Python, by page and the beginning of one of their lines.
PYTHON: dict[str, dict[str, str]] = {
    "docs/guides/clients.md": {
        "from kserve import": "KServe's client has an environment of its own: tests/wire runs it there",
    },
    "docs/reference/client.md": {
        'with client.shared_memory("digits", rows=32, device=0)': (
            "it needs a GPU and torch; tests/client/memory/test_cuda_shared_memory.py does the same without torch"
        ),
        'with client.shared_memory("digits", rows=32) as': "it needs a server with shared memory; tests/client/test_docstrings.py runs the same",
    },
}

# Indented blocks that are not commands but output, trees or configuration, by page and beginning.
OTHERS: dict[str, tuple[str, ...]] = {
    "docs/design/processes.md": ("16 cores: ",),
    "docs/guides/gpu.md": ("optimization {", "model minilm in FP16", "no GPU metrics: "),
    "docs/reference/model_config.md": (
        "config.pbtxt: line 2",
        'platform: "ensemble"',
        "model_operations {",
        "max_batch_size: 64",
    ),
    "docs/reference/repository.md": ("models/",),
    "docs/guides/security.md": ("INFO ", "# --auth-tokens", "# --auth-certificates"),
    "docs/guides/serving.md": (
        "tensorferry serve: [models.digits]",
        "[models.digits] has",
        "tensorferry serve: text.onnx",
        "model mean is not padded",
    ),
    "docs/reference/status.md": ("tensorferry 0.2.0 on", "MODEL ", "digits v1: batches", "search v1:"),
    "docs/reference/tracing.md": ("method=ModelInfer", "inference.GRPCInferenceService/ModelInfer"),
}
