"""Kubernetes and KServe manifests fit their schemas, and agree with the server."""

from __future__ import annotations

import re
from collections.abc import Iterator

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

from tensorferry.protos import SERVICE_NAME
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.observability.monitoring.metrics.metrics import Metrics
from tensorferry.server.observability.monitoring.processes import ServerStatistics

OVERLAYS = sorted(folder.name for folder in (DEPLOY / "kubernetes" / "overlays").iterdir())
COMPONENTS = sorted(folder.name for folder in (DEPLOY / "kubernetes" / "components").iterdir())
KSERVE = ("clusterservingruntime.yaml", "inferenceservice.yaml")
# Seconds of the grace period beyond the drain flags: for the last answers, the last traces, and the
# exit.
FAREWELL_SECONDS = 10
# The server's names in the health service: the protocol's, and its own.
SERVICES = {"", SERVICE_NAME, "grpc.health.v1.Health"}

pytestmark = MANIFEST_TOOLS


@pytest.fixture(
    scope="module", params=[*OVERLAYS, *(f"cpu+{component}" for component in COMPONENTS), "gpu+mtls"]
)
def documents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """Return the documents of each overlay, of the CPU overlay with each component, and of the GPU
    overlay with TLS.
    """
    name, _, component = str(request.param).partition("+")
    folder = DEPLOY / "kubernetes" / "overlays" / name
    if component:
        folder = with_component(folder, component, tmp_path_factory.mktemp("overlay"))
    return checked(built(folder), "manifests")


def ports(container: Document) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def probes(container: Document) -> Iterator[Document]:
    for when in ("startup", "readiness", "liveness"):
        yield container[f"{when}Probe"]


def assert_hardened(container: Document) -> None:
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_container_is_started_as_the_server_understands_it(documents: list[Document]) -> None:
    pod, container = pod_of(documents)
    config = configuration(container["args"])
    assert ports(container) == {"grpc": config.port, "metrics": config.metrics_port}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert volumes == set(mounts)
    if "models" in volumes:
        assert mounts["models"]["mountPath"] == str(config.model_repositories[0])
        assert mounts["models"]["readOnly"] is True
    else:
        # They are in the image, where nothing may be mounted over them.
        assert {mount["mountPath"] for mount in mounts.values()} == {"/tmp"}
        assert not of_kind(documents, "PersistentVolumeClaim")
    if config.tls_certificate is None:
        for probe in probes(container):
            assert probe["grpc"]["port"] == config.port
            assert probe["grpc"]["service"] in SERVICES
        assert container["livenessProbe"]["grpc"]["service"] == "grpc.health.v1.Health"
        return
    # The kubelet's probes use no TLS.
    asked = []
    for probe in probes(container):
        assert "grpc" not in probe
        assert ports(container)[probe["httpGet"]["port"]] == config.metrics_port
        assert "scheme" not in probe["httpGet"]
        asked.append(probe["httpGet"]["path"])
    assert asked == ["/readyz", "/readyz", "/healthz"]
    assert not config.metrics_host.startswith("127.")


# Contents of each Secret, by its name and the path of its volume.
SECRETS = {
    "/etc/tensorferry/tls": ("tensorferry-tls", {"tls.crt", "tls.key", "ca.crt"}),
    "/etc/tensorferry/callers": ("tensorferry-tokens", {"tokens"}),
}


def test_secrets_are_where_the_server_looks_for_them(documents: list[Document]) -> None:
    pod, container = pod_of(documents)
    config = configuration(container["args"])
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    files = [config.tls_certificate, config.tls_key, config.tls_client_ca, config.auth_tokens]
    wanted = [file for file in files if file is not None]
    for file in wanted:
        mount, (secret, keys) = mounts[str(file.parent)], SECRETS[str(file.parent)]
        assert file.name in keys
        # A volume mounted with subPath is never renewed.
        assert mount == {"name": mount["name"], "mountPath": str(file.parent), "readOnly": True}
        assert volumes[mount["name"]]["secret"] == {"secretName": secret, "defaultMode": 0o400}
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert {str(file.parent) for file in wanted} == mounts.keys() & SECRETS.keys()
    assert (config.tls_certificate is None) == (config.auth_tokens is None)
    applications = {service["spec"]["ports"][0]["appProtocol"] for service in of_kind(documents, "Service")}
    assert applications == ({"kubernetes.io/h2c"} if config.tls_certificate is None else {"https"})


def test_the_grace_period_holds_all_that_happens_in_it(documents: list[Document]) -> None:
    pod, container = pod_of(documents)
    config = configuration(container["args"])
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert config.drain_delay > 0
    assert (
        pod["terminationGracePeriodSeconds"]
        == waits + config.drain_delay + config.drain_seconds + FAREWELL_SECONDS
    )


def test_pods_have_no_rights_and_stay_within_bounds(documents: list[Document]) -> None:
    pod, container = pod_of(documents)
    assert_hardened(container)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"]["cpu"]
    assert re.fullmatch(r"tensorferry:\d[\w.]*-(cpu|cuda)", container["image"])
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert f" AS {container['image'].rpartition('-')[2]}\n" in dockerfile
    user = pod["securityContext"]["runAsUser"]
    assert f"\nUSER {user}:{pod['securityContext']['runAsGroup']}\n" in dockerfile


def test_whatever_selects_pods_selects_these(documents: list[Document]) -> None:
    (deployment,) = of_kind(documents, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in selectors_of(documents):
        assert selector
        assert selector.items() <= labels.items()
    # Clients are other pods.
    (network,) = of_kind(documents, "NetworkPolicy")
    assert network["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == {
        "tensorferry-client": "true"
    }


def test_services_lead_to_ports_that_are_served(documents: list[Document]) -> None:
    (deployment,) = of_kind(documents, "Deployment")
    served = ports(pod_of(documents)[1])
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(documents, "Service")}
    assert services["tensorferry-headless"]["clusterIP"] == "None"
    assert "clusterIP" not in services["tensorferry"]
    for service in services.values():
        (port,) = service["ports"]
        assert port["port"] == served[port["targetPort"]]
    (network,) = of_kind(documents, "NetworkPolicy")
    assert [rule["ports"][0]["port"] for rule in network["spec"]["ingress"]] == [
        served["grpc"],
        served["metrics"],
    ]
    for monitor in of_kind(documents, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in served
        # Prometheus operator takes the job from this label of the pods.
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert labels[monitor["spec"]["jobLabel"]] == JOB_OF_ALERTS


def test_autoscaling_goes_by_metrics_that_there_are(documents: list[Document]) -> None:
    server = ServerStatistics("1", "lane", ready=True)
    page, _ = Metrics(ModelRegistry(), lambda: server).page()
    known = set(re.findall(r"^# TYPE (\w+)", page.decode(), re.MULTILINE))
    for scaled in of_kind(documents, "ScaledObject"):
        (deployment,) = of_kind(documents, "Deployment")
        assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        assert "replicas" not in deployment["spec"]
        assert of_kind(documents, "PodMonitor")
        for trigger in scaled["spec"]["triggers"]:
            named = set(re.findall(r"\btensorferry_\w+", trigger["metadata"]["query"]))
            assert named
            assert named <= known
            assert float(trigger["metadata"]["threshold"]) > 0


def test_the_kserve_runtime_fits_the_server_and_the_service_fits_the_runtime() -> None:
    runtime, service = (
        checked((DEPLOY / "kserve" / name).read_text(), "kserve", "kserve")[0] for name in KSERVE
    )
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"
    config = configuration(
        [argument.replace("{{.Name}}", service["metadata"]["name"]) for argument in container["args"]]
    )
    (model,) = config.models
    assert (model.name, str(model.path)) == (service["metadata"]["name"], "/mnt/models/model.onnx")
    assert ports(container) == {"h2c": config.port}
    assert runtime["spec"]["annotations"]["prometheus.kserve.io/port"] == str(config.metrics_port)
    for probe in probes(container):
        assert probe["grpc"]["port"] == config.port
        assert probe["grpc"]["service"] in SERVICES
    assert_hardened(container)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"]: "/tmp" for volume in runtime["spec"]["volumes"]}
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert predictor["model"]["protocolVersion"] in runtime["spec"]["protocolVersions"]
    formats = [supported["name"] for supported in runtime["spec"]["supportedModelFormats"]]
    assert predictor["model"]["modelFormat"]["name"] in formats
    assert (
        predictor["terminationGracePeriodSeconds"]
        == config.drain_delay + config.drain_seconds + FAREWELL_SECONDS
    )
