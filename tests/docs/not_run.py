"""The commands and code that tests/docs does not run, with the reasons, by page and beginning."""

from __future__ import annotations

TOOLS = "it needs tools of other languages; tests/wire runs it where `make tools` has built them"
CLUSTER = "it needs a cluster; tests/deploy checks the files"

# The reason for each page and beginning of a command.
COMMANDS: dict[tuple[str, str], str] = {
    ("docs/guides/clients.md", "mkdir ferry"): TOOLS,
    ("docs/guides/clients.md", "go "): TOOLS,
    ("docs/guides/clients.md", "P="): TOOLS,
    ("docs/guides/clients.md", "PATH="): TOOLS,
    ("docs/guides/clients.md", "npm "): TOOLS,
    ("docs/guides/clients.md", "mvn "): TOOLS,
    ("docs/guides/clients.md", "chmod "): TOOLS,
    ("docs/guides/clients.md", "lib/protoc"): TOOLS,
    ("docs/guides/clients.md", "java"): TOOLS,
    ("docs/guides/clients.md", "tests/wire/perf_analyzer.sh"): TOOLS,
    ("docs/guides/clients.md", "LD_LIBRARY_PATH="): TOOLS,
    (
        "docs/guides/load_testing.md",
        "tensorferry bench 127.0.0.1:8001 digits --find-rate",
    ): "it takes a minute; test_bench.py runs a short one",
    (
        "docs/guides/kubernetes.md",
        "docker ",
    ): "it needs Docker and a registry; test_kubernetes_page.py checks the Dockerfile and the folders",
    (
        "docs/guides/kubernetes.md",
        "helm upgrade ",
    ): "it needs a cluster; test_kubernetes_page.py renders the same values",
    ("docs/guides/kubernetes.md", "helm rollback "): CLUSTER,
    (
        "docs/guides/kubernetes.md",
        "kubectl run ",
    ): "it needs a cluster; test_kubernetes_page.py runs the container's command",
    ("docs/guides/kubernetes.md", "kubectl create "): CLUSTER,
    ("docs/guides/kubernetes.md", "kubectl rollout "): CLUSTER,
    ("docs/guides/kubernetes.md", "kubectl port-forward "): CLUSTER,
    (
        "docs/guides/kubernetes.md",
        "kubectl apply ",
    ): "it needs a cluster; test_kubernetes_page.py builds the same folder",
    ("docs/guides/operations.md", "docker run "): "it needs Docker and the image",
    ("docs/guides/operations.md", "kubectl rollout "): CLUSTER,
    (
        "docs/guides/serving.md",
        "tensorferry config digits --config c.toml",
    ): "c.toml names a model of the reader's",
    (
        "docs/guides/security.md",
        "kustomize build mine",
    ): "tests/deploy builds it where `make tools` has built kustomize",
    (
        "docs/guides/security.md",
        "tensorferry token web --file mine/tokens",
    ): "the line before; it needs the page's directory",
}

# Blocks of Python, by page and the beginning of one of their lines.
PYTHON: dict[tuple[str, str], str] = {
    (
        "docs/guides/clients.md",
        "from kserve import",
    ): "KServe's client has an environment of its own: tests/wire runs it there",
    (
        "docs/reference/client.md",
        'with client.shared_memory("digits", rows=32, device=0)',
    ): "it needs a GPU and torch; tests/client/memory/test_cuda_shared_memory.py does the same without torch",
    (
        "docs/reference/client.md",
        'with client.shared_memory("digits", rows=32) as',
    ): "it needs a server with shared memory; tests/client/test_docstrings.py runs the same",
}

# Indented blocks that are not commands but output, trees or configuration.
OTHERS: tuple[tuple[str, str], ...] = (
    ("docs/design/processes.md", "16 cores: "),
    ("docs/guides/gpu.md", "optimization {"),
    ("docs/guides/gpu.md", "model minilm in FP16"),
    ("docs/guides/gpu.md", "no GPU metrics: "),
    ("docs/reference/model_config.md", "config.pbtxt: line 2"),
    ("docs/reference/model_config.md", 'platform: "ensemble"'),
    ("docs/reference/model_config.md", "model_operations {"),
    ("docs/reference/model_config.md", "max_batch_size: 64"),
    ("docs/reference/repository.md", "models/"),
    ("docs/guides/security.md", "INFO "),
    ("docs/guides/security.md", "# --auth-tokens"),
    ("docs/guides/security.md", "# --auth-certificates"),
    ("docs/guides/serving.md", "tensorferry serve: [models.digits]"),
    ("docs/guides/serving.md", "[models.digits] has"),
    ("docs/guides/serving.md", "tensorferry serve: text.onnx"),
    ("docs/guides/serving.md", "model mean is not padded"),
    ("docs/reference/status.md", "tensorferry 0.2.0 on"),
    ("docs/reference/status.md", "MODEL "),
    ("docs/reference/status.md", "digits v1: batches"),
    ("docs/reference/status.md", "search v1:"),
    ("docs/reference/tracing.md", "method=ModelInfer"),
    ("docs/reference/tracing.md", "inference.GRPCInferenceService/ModelInfer"),
)
