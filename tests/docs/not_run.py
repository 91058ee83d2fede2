"""What tests/docs does not run, and why. Each is known by its page and how it begins."""

from __future__ import annotations

NETWORK = "it installs from the network; tests/installs does so"
TOOLS = "it needs tools of other languages; tests/wire runs it where `make tools` has built them"
CLUSTER = "it needs a cluster; tests/deploy checks the files"
LONG = "it takes minutes; only its name is checked"
MODEL = "it needs a model of the reader's; tests/e2e has such models"
DEVICE = "it needs a GPU; its flags are checked"

# Page, beginning of the command: why.
COMMANDS: dict[tuple[str, str], str] = {
    ("docs/clients.md", "mkdir ferry"): TOOLS,
    ("docs/clients.md", "go "): TOOLS,
    ("docs/clients.md", "P="): TOOLS,
    ("docs/clients.md", "PATH="): TOOLS,
    ("docs/clients.md", "npm "): TOOLS,
    ("docs/clients.md", "mvn "): TOOLS,
    ("docs/clients.md", "chmod "): TOOLS,
    ("docs/clients.md", "lib/protoc"): TOOLS,
    ("docs/clients.md", "java"): TOOLS,
    ("docs/clients.md", "tests/wire/perf_analyzer.sh"): TOOLS,
    ("docs/clients.md", "LD_LIBRARY_PATH="): TOOLS,
    ("docs/operations.md", "perf_analyzer "): TOOLS,
    ("docs/operations.md", "docker run "): "it needs Docker and the image",
    ("docs/operations.md", "kubectl rollout "): CLUSTER,
    (
        "docs/security.md",
        "kustomize build mine",
    ): "tests/deploy builds it where `make tools` has built kustomize",
    (
        "docs/security.md",
        "tensorferry token web --file mine/tokens",
    ): "the line before; it needs the page's directory",
}

# Blocks of Python: page, beginning of the line that tells them apart.
PYTHON: dict[tuple[str, str], str] = {
    (
        "docs/clients.md",
        "from kserve import",
    ): "KServe's client has an environment of its own: tests/wire runs it there",
}

# Indented blocks that are no commands: output, trees, and configuration.
OTHERS: tuple[tuple[str, str], ...] = (
    ("README.md", "protos/"),
    ("docs/gpu.md", "optimization {"),
    ("docs/gpu.md", "model minilm in FP16"),
    ("docs/gpu.md", "the metrics have no figures"),
    ("docs/model_config.md", "config.pbtxt: line 2"),
    ("docs/repository.md", "models/"),
    ("docs/security.md", "INFO "),
    ("docs/security.md", "# --auth-tokens"),
    ("docs/security.md", "# --auth-certificates"),
    ("docs/serving.md", "tensorferry serve: text.onnx"),
    ("docs/serving.md", "model mean is not padded"),
    ("docs/serving.md", '{"id": 1'),
    ("docs/status.md", "tensorferry 0.1.0 on"),
    ("docs/status.md", "MODEL "),
    ("docs/status.md", "digits v1: batches"),
    ("docs/tracing.md", "method=ModelInfer"),
)
