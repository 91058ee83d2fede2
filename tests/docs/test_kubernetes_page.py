"""docs/guides/kubernetes.md: its notebook, commands and files, and real servers with the arguments of its manifests."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deploy.manifests import MANIFEST_TOOLS, Document, checked, of_kind, pod_of
from docs.conftest import Place, serving
from docs.pages import ROOT, Command, blocks, commands, is_shell
from docs.running import check_files, check_serve, execute, reason, run
from support.dockerfile import instructions
from support.processes.server import environment, running
from support.wire.programs import CLIENTS, needs

from tensorferry.client import InferenceClient

PAGE = "docs/guides/kubernetes.md"
BLOCKS = [block for block in blocks() if block.page == PAGE]
COMMANDS = [command for block in BLOCKS if is_shell(block) for command in commands(block)]
NOTEBOOK, DATA_FRAME, POD = [block for block in BLOCKS if block.language == "python"]
# The files of the page: each begins with a comment that names it.
FILES = {
    found[1]: block.text
    for block in BLOCKS
    if block.fenced and (found := re.match(r"# (service/\S+)\n", block.text))
}
MODEL = "service/models/rents/1/model.onnx"
# It has the tensors of the page's model, and takes its place where scikit-learn is not installed.
EXAMPLE = ROOT / "examples" / "table" / "rents.onnx"
EXPORTERS = CLIENTS / "exporters" / "bin" / "python"
HELM = CLIENTS / "helm"
HADOLINT = CLIENTS / "manifests" / "bin" / "hadolint"
# Commands that have tests of their own.
APART = {("pip", "install"), ("tensorferry", "inspect"), ("helm", "template"), ("kustomize", "build")}


def command(*beginning: str) -> Command:
    """Return the command of the page that begins with these words; of several, the first."""
    return next(each for each in COMMANDS if tuple(each.words[: len(beginning)]) == beginning)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's checkout, with the files of the page and the model that its notebook writes."""
    directory = tmp_path_factory.mktemp("kubernetes")
    for name in ("examples/table", "deploy"):
        shutil.copytree(ROOT / name, directory / name)
    for name, text in FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text + "\n")
    if EXPORTERS.exists():
        subprocess.run(
            [EXPORTERS, "-c", NOTEBOOK.text], cwd=directory, env=environment(), timeout=240, check=True
        )
    else:
        (directory / MODEL).parent.mkdir(parents=True)
        shutil.copyfile(EXAMPLE, directory / MODEL)
    return directory


@pytest.fixture(scope="module")
def place(folder: Path) -> Iterator[Place]:
    """The server that the page starts on the reader's machine."""
    with serving(folder, *command("tensorferry", "serve").words[2:]) as found:
        yield replace(found, variables={**found.variables, "PATH": f"{CLIENTS}:{found.variables['PATH']}"})


def output_of(each: Command, place: Place) -> str:
    """Run a command of the page, as written; return what it prints."""
    done = subprocess.run(
        each.text,
        shell=True,
        cwd=place.directory,
        env=dict(place.variables),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_notebook_imports_what_the_page_installs() -> None:
    compile(NOTEBOOK.text, NOTEBOOK.place, "exec")
    extra, *packages = command("pip", "install").words[2:]
    assert extra == ".[cpu]"
    # `make test-exporting` installs them, with versions and hashes.
    assert set(packages) <= set((ROOT / "requirements" / "exporters.in").read_text().split())
    imported = set(re.findall(r"^(?:from|import) (\w+)", NOTEBOOK.text, re.MULTILINE)) - {"pathlib"}
    assert imported == {package.replace("scikit-learn", "sklearn") for package in packages}


@pytest.mark.skipif(not EXPORTERS.exists(), reason="make test-exporting installs scikit-learn")
def test_the_notebook_writes_a_model_with_the_tensors_of_the_example(place: Place) -> None:
    with (
        running(EXAMPLE, transport="lane") as other,
        InferenceClient(place.server.address) as client,
        InferenceClient(other.address) as example,
    ):
        made, wanted = client.metadata("rents"), example.metadata("rents")
        assert (made.inputs, made.outputs) == (wanted.inputs, wanted.outputs)


def test_the_model_batches(place: Place) -> None:
    printed = output_of(command("tensorferry", "inspect"), place)
    assert "verdict   PROVED" in printed
    # The page chooses the size of batches by the last two paragraphs.
    assert re.search(r"^best +(\d+ rows|1 row)", printed, re.MULTILINE)
    assert re.search(r"^5 ms +a batch of up to (\d+ rows|1 row)", printed, re.MULTILINE)


@pytest.mark.parametrize("each", [each for each in COMMANDS if tuple(each.words[:2]) not in APART], ids=str)
def test_command(each: Command, place: Place) -> None:
    match each.words:
        case ["tensorferry", "serve", *_]:
            check_serve(each, place.directory)
        case ["docker", "build", "-f", *_]:
            check_files(each)
        case ["tensorferry", "bench", *_]:
            # The last of equal flags counts. A busy machine may answer nothing within the deadline of the page.
            run(replace(each, text=f"{each.text} --timeout 60"), place)
        case _ if not reason(each):
            run(each, place)


def test_the_data_frame_is_a_request(place: Place) -> None:
    execute(DATA_FRAME, place)


def test_the_load_test_has_the_deadline_of_the_server() -> None:
    load = next(each.words for each in COMMANDS if "--rate" in each.words)
    deadline = float(load[load.index("--timeout") + 1])
    for name in ("service/values.yaml", "service/kustomization.yaml"):
        assert re.findall(r"--slo-ms=(\d+)", FILES[name]) == [f"{deadline * 1000:.0f}"]


def copied_folders(folder: Path) -> dict[str, Path]:
    """Return the folders that the page's image has beside its base, by their path in it."""
    context = folder / [each for each in COMMANDS if each.words[:2] == ["docker", "build"]][1].words[-1]
    found = {}
    for arguments in [given for kind, given in instructions(FILES["service/Dockerfile"]) if kind == "COPY"]:
        source, target = [word for word in shlex.split(arguments) if not word.startswith("--")]
        found[target] = context / source
    return found


def test_the_image_has_the_model_where_the_server_looks_for_it(folder: Path) -> None:
    (models,) = copied_folders(folder).values()
    assert (models / "rents" / "1" / "model.onnx").is_file()
    assert list(copied_folders(folder)) == ["/models"]
    # What `docker run` starts.
    project = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    assert dict(instructions(project))["CMD"] == '["serve", "--model-repository=/models", "--host=0.0.0.0"]'


@pytest.fixture(scope="module")
def chart(place: Place) -> list[Document]:
    """What the chart renders with the page's values."""
    return checked(output_of(command("helm", "template"), place), "manifests")


@pytest.fixture(scope="module")
def built(place: Place) -> list[Document]:
    """What kustomize builds from the page's folder."""
    return checked(output_of(command("kustomize", "build"), place), "manifests")


@MANIFEST_TOOLS
@needs(HELM)
def test_both_ways_start_the_same_servers(chart: list[Document], built: list[Document]) -> None:
    (_, by_helm), (_, by_kustomize) = pod_of(chart), pod_of(built)
    assert sorted(by_helm["args"]) == sorted(by_kustomize["args"])
    assert by_helm["image"] == by_kustomize["image"] == command("docker", "push").words[-1]
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "volumeMounts"):
        assert by_helm[name] == by_kustomize[name]
    (scheduled,) = {each["metadata"]["namespace"] for each in built}
    assert scheduled == "ml"


def rendered(each: Command, place: Place) -> list[Document]:
    """Return what a `helm upgrade` of the page would install."""
    text = each.text.replace("helm upgrade --install ", "helm template ")
    assert text != each.text
    return checked(output_of(replace(each, text=text), place), "manifests")


@MANIFEST_TOOLS
@needs(HELM)
def test_the_autoscaler_scales_the_deployment(place: Place) -> None:
    upgrades = [each for each in COMMANDS if each.words[:2] == ["helm", "upgrade"]]
    (scaled,) = of_kind(documents := rendered(upgrades[-1], place), "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"] == {"name": "rents"}
    assert "replicas" not in of_kind(documents, "Deployment")[0]["spec"]
    thresholds = {trigger["name"]: trigger["metadata"]["threshold"] for trigger in scaled["spec"]["triggers"]}
    assert thresholds["queue-delay"] == "0.02"


@MANIFEST_TOOLS
@needs(HELM)
def test_pods_of_callers_reach_the_services(chart: list[Document]) -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(chart, "Service")}
    words = command("kubectl", "run").words
    name, _, port = words[words.index("--target") + 1].partition(":")
    assert services[name]["ports"][0]["port"] == int(port)
    (headless,) = re.findall(r'"dns:///([\w-]+):8001"', POD.text)
    assert services[headless]["clusterIP"] == "None"
    (policy,) = of_kind(chart, "NetworkPolicy")
    label, _, value = words[words.index("--labels") + 1].partition("=")
    (clients,) = [rule for rule in policy["spec"]["ingress"] if rule["ports"] == [{"port": 8001}]]
    assert clients["from"][0]["podSelector"]["matchLabels"] == {label: value}


def test_the_client_of_a_pod_calls(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    text = POD.text.replace('"dns:///rents-headless:8001"', f'"ipv4:{place.server.address}"')
    assert text != POD.text
    names: dict[str, Any] = {}
    exec(compile(text, POD.place, "exec"), names)
    names["client"].close()
    assert re.fullmatch(r"\[\[\d+\.\d*\]\]\n", capsys.readouterr().out)


def test_the_container_of_the_caller_calls(place: Place) -> None:
    """The entry point of the image is `tensorferry`."""
    _, _, arguments = command("kubectl", "run").text.partition(" -- ")
    adapted = arguments.replace(" rents:8001 ", f" {place.server.address} ")
    assert adapted != arguments
    run(replace(command("kubectl", "run"), text=f"tensorferry {adapted}"), place)
