"""The Helm chart fits its schemas and the server, and renders what deploy/kubernetes builds."""

from __future__ import annotations

import copy
import functools
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy.manifests import (
    DEPLOY,
    JOB_OF_ALERTS,
    MANIFEST_TOOLS,
    Document,
    built,
    checked,
    configuration,
    of_kind,
    pod_of,
    selectors_of,
    with_component,
)
from deploy.test_manifests import FAREWELL_SECONDS, assert_hardened
from support.wire.programs import CLIENTS, needs

CHART = DEPLOY / "helm" / "tensorferry"
EXAMPLES = DEPLOY / "helm" / "examples"
HELM = CLIENTS / "helm"
# The names of values files, "" for the chart's defaults.
VALUES = ["", *sorted(file.name for file in EXAMPLES.glob("*.yaml"))]

pytestmark = [MANIFEST_TOOLS, needs(HELM)]


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=100)


def values_of(name: str) -> tuple[str | Path, ...]:
    return ("--values", EXAMPLES / name) if name else ()


@functools.cache
def rendered(values: str) -> str:
    ended = helm("template", "tensorferry", CHART, *values_of(values))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@functools.cache
def documents(values: str) -> list[Document]:
    """Return the documents of the chart with a values file, which must fit their schemas."""
    return checked(rendered(values), "manifests")


@pytest.mark.parametrize("values", VALUES)
def test_the_linter_accepts_the_chart(values: str) -> None:
    linted = helm("lint", "--strict", CHART, *values_of(values))
    assert linted.returncode == 0, linted.stdout + linted.stderr


# Values, and the overlay and component of deploy/kubernetes that are for the same purpose.
SAME = [
    ("", "cpu", ""), ("gpu.yaml", "gpu", ""), ("tls.yaml", "tls", ""), ("mtls.yaml", "cpu", "mtls"),
    ("autoscaling.yaml", "autoscaling", ""), ("model-image.yaml", "cpu", "model-image"),
    ("model-in-server.yaml", "cpu", "model-in-server"),
]  # fmt: skip
CHART_LABELS = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/component",
    "helm.sh/chart",
}


def without_helm(value: Any) -> Any:
    """Return a document without what Helm adds: labels, by which it finds its objects, annotations, and namespaces."""
    if isinstance(value, dict):
        kept = {key: without_helm(each) for key, each in value.items() if key not in CHART_LABELS}
        if kept.get("annotations") == {"helm.sh/resource-policy": "keep"}:
            del kept["annotations"]
        if "containers" in kept:
            kept["containers"] = [
                {**container, "args": sorted(container["args"])} for container in kept["containers"]
            ]
            kept["volumes"] = sorted(kept["volumes"], key=lambda volume: str(volume["name"]))
        return kept
    if isinstance(value, list):
        return [without_helm(each) for each in value]
    # In queries. kustomize does not know the namespace.
    return value.replace('namespace="default",', "") if isinstance(value, str) else value


def by_name(found: list[Document]) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): without_helm(copy.deepcopy(each)) for each in found}


@pytest.mark.parametrize(("values", "overlay", "component"), SAME)
def test_the_chart_renders_what_kustomize_builds(
    values: str, overlay: str, component: str, tmp_path: Path
) -> None:
    """The manifests are written twice, for two tools, and may differ only in labels."""
    folder = DEPLOY / "kubernetes" / "overlays" / overlay
    if component:
        folder = with_component(folder, component, tmp_path)
    wanted = by_name(checked(built(folder), "manifests"))
    made = by_name(documents(values))
    assert made.keys() == wanted.keys()
    for name, document in wanted.items():
        assert made[name] == document


def test_http_is_a_port_of_the_pod_its_services_and_the_network_policy() -> None:
    made = helm("template", "tensorferry", CHART, "--set", "http.enabled=true")
    found = checked(made.stdout, "manifests")
    _, container = pod_of(found)
    assert "--http-port=8000" in container["args"]
    assert {"name": "http", "containerPort": 8000} in container["ports"]
    services = of_kind(found, "Service")
    assert len(services) == 2
    for service in services:
        assert [port["port"] for port in service["spec"]["ports"]] == [8001, 8000]
    (policy,) = of_kind(found, "NetworkPolicy")
    assert [port["port"] for port in policy["spec"]["ingress"][0]["ports"]] == [8001, 8000]


# The others render what test_manifests.py checks.
ALONE = sorted({*VALUES} - {values for values, _, _ in SAME})


@pytest.mark.parametrize("values", ALONE)
def test_the_server_understands_its_arguments_has_no_rights_and_time_to_drain(values: str) -> None:
    pod, container = pod_of(documents(values))
    config = configuration(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    http = {} if config.http_port is None else {"http": config.http_port}
    assert ports == {"grpc": config.port, "metrics": config.metrics_port, **http}
    assert [str(path) for path in config.model_repositories] == ["/models"]
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drains = config.drain_delay + config.drain_seconds
    assert pod["terminationGracePeriodSeconds"] == waits + drains + FAREWELL_SECONDS
    for each in (container, *pod.get("initContainers", ())):
        assert_hardened(each)
        resources = each["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]


@pytest.mark.parametrize("values", VALUES)
def test_selectors_select_the_servers(values: str) -> None:
    (deployment,) = of_kind(documents(values), "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in selectors_of(documents(values)):
        # The release's name, too, so that two releases in a namespace are apart.
        assert selector == {
            "app.kubernetes.io/name": "tensorferry",
            "app.kubernetes.io/instance": "tensorferry",
        }
        assert selector.items() <= labels.items()
    services = of_kind(documents(values), "Service")
    # One Service, because a server behind both would be scraped twice.
    for monitor in of_kind(documents(values), "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (selected,) = [each for each in services if wanted <= each["metadata"]["labels"].items()]
        assert selected["spec"]["clusterIP"] == "None"
        container_ports = {port["name"] for port in pod_of(documents(values))[1]["ports"]}
        assert {each["targetPort"] for each in monitor["spec"]["endpoints"]} <= container_ports


def test_models_are_downloaded_into_the_folder_that_the_server_reads() -> None:
    pod, server = pod_of(documents("model-download.yaml"))
    (download,) = pod["initContainers"]
    written = {mount["mountPath"]: mount for mount in download["volumeMounts"]}["/models"]
    read = {mount["mountPath"]: mount for mount in server["volumeMounts"]}["/models"]
    assert written["name"] == read["name"]
    assert "readOnly" not in written
    assert read["readOnly"] is True
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == read["name"]]
    # A pod that uses more than its ephemeral storage is evicted.
    storage = server["resources"]["limits"]["ephemeral-storage"]
    assert int(storage.removesuffix("Gi")) > int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    (policy,) = of_kind(documents("model-download.yaml"), "NetworkPolicy")
    assert policy["spec"]["egress"]
    assert not of_kind(documents("model-download.yaml"), "PersistentVolumeClaim")


# The other values with an autoscaler are those of an overlay, which test_manifests.py checks.
def test_the_autoscaler_by_processors_scales_the_deployment_and_leaves_the_job_of_the_alerts() -> None:
    found = documents("autoscaling-cpu.yaml")
    (deployment,) = of_kind(found, "Deployment")
    (scaler,) = of_kind(found, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    # An upgrade must not reset it.
    assert "replicas" not in deployment["spec"]
    # Prometheus operator takes the job from a label of the Service.
    (monitor,) = of_kind(found, "ServiceMonitor")
    for service in of_kind(found, "Service"):
        assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == JOB_OF_ALERTS


def test_the_autoscaler_reads_the_metrics_of_its_own_servers() -> None:
    ended = helm("template", "digits", CHART, *values_of("autoscaling.yaml"), "--namespace", "ml")
    (scaler,) = of_kind(checked(ended.stdout, "manifests"), "ScaledObject")
    for trigger in scaler["spec"]["triggers"]:
        metrics = re.findall(r"tensorferry_\w+\{([^}]*)\}", trigger["metadata"]["query"])
        assert len(metrics) == trigger["metadata"]["query"].count("tensorferry_") == 2
        for labels in metrics:
            assert 'namespace="ml",' in labels
            (pods,) = re.findall(r'pod=~"([^"]*)"', labels)
            assert re.fullmatch(pods, "digits-6d4cf56db6-x2k8v")
            # Of a release that is named digits-new.
            assert not re.fullmatch(pods, "digits-new-6d4cf56db6-x2k8v")


def test_other_names_and_rights_are_used_everywhere() -> None:
    found = documents("everything.yaml")
    pod, container = pod_of(found)
    assert {each["metadata"]["name"] for each in found} == {"digits", "digits-headless"}
    assert pod["serviceAccountName"] == "inference"
    assert not of_kind(found, "ServiceAccount") + of_kind(found, "NetworkPolicy")
    assert container["image"].startswith("registry.example.com/ml/tensorferry@sha256:")
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "digits-models"


# Values that cannot work, and what the error says.
REFUSED = [
    ("auth.tokensSecret=t", 'auth.tokensSecret is "t" without tls.secret'),
    ("tls.clientCertificates=true", "tls.clientCertificates is true without tls.secret"),
    ("autoscaling.enabled=true", "autoscaling.kind is ScaledObject without monitoring.enabled"),
    ("models.source=image", "models.image.reference is empty"),
    ("models.source=init", "models.init.image is empty"),
    ("serviceAccount.create=false", "serviceAccount.name is empty"),
    ("models.source=s3", "models/source"),
    ("replica=3", "replica"),
    ("server.extraArgs={--max-batch-size}", "server/extraArgs/0"),
    ("image.digest=latest", "image/digest"),
]


@pytest.mark.parametrize(("value", "error"), REFUSED)
def test_values_that_cannot_work_are_refused(value: str, error: str) -> None:
    ended = helm("template", "tensorferry", CHART, "--set", value)
    assert ended.returncode != 0
    assert error in ended.stderr


def leaves(schema: Any, path: str = "") -> Iterator[str]:
    """Return the names of the values of a schema."""
    for name, each in schema.get("properties", {}).items():
        if each.get("additionalProperties") is False and path + name not in RESOURCES:
            yield from leaves(each, f"{path}{name}.")
        else:
            yield path + name


# Kubernetes' own objects.
RESOURCES = ("resources", "models.init.resources")


def test_each_value_has_a_default_and_each_default_a_schema() -> None:
    shown = helm("show", "values", CHART)
    ended = subprocess.run(
        [CLIENTS / "manifests" / "bin" / "python", "-c", "import json, sys, yaml; print(json.dumps(yaml.safe_load(sys.stdin)))"],
        input=shown.stdout, capture_output=True, text=True, check=True,
    )  # fmt: skip
    defaults = json.loads(ended.stdout)
    schema = json.loads((CHART / "values.schema.json").read_text())
    # `global` is Helm's own.
    names = set(leaves(schema)) - {"global"}
    for name in names:
        value = defaults
        for key in name.split("."):
            assert key in value, name
            value = value[key]
    # The schema refuses other names, so the defaults have no more than these.
    assert len(names) > 50


def test_the_chart_has_the_version_of_the_project() -> None:
    version = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["version"]
    chart = (CHART / "Chart.yaml").read_text().splitlines()
    assert {f"version: {version}", f"appVersion: {version}"} <= set(chart)


def test_the_notes_name_the_services() -> None:
    notes = helm("install", "digits", CHART, "--dry-run=client", "--namespace", "ml").stdout
    assert "serves at digits.ml.svc:8001.\n" in notes
    assert "dns:///digits-headless.ml.svc:8001" in notes
