"""The manifests for Kubernetes: valid by its own schemas, and they fit together and the broker.

The schemas come with the package ``kubernetes-validate``. ``tests/deploy/test_image.py`` runs the image with
the settings of these manifests, on a volume as Kubernetes makes it.
"""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from headrace.server.server import ALL_ROUTES, DRAIN_S
from headrace.settings import BY_NAME, load
from tests.deploy.dockerfile import ROOT, environment, stages

FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ["1.30", kubernetes_validate.latest_version()]
"""An old one that is still in use, and the newest."""


def documents() -> dict[str, Any]:
    """By kind and name."""
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] != "Kustomization":
                found[f"{document['kind']}/{document['metadata']['name']}"] = document
    return found


def pod() -> Any:
    return documents()["StatefulSet/headrace"]["spec"]["template"]


def broker() -> Any:
    [container] = pod()["spec"]["containers"]
    return container


# --- the schemas ------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", documents())
def test_it_is_valid(name: str, version: str) -> None:
    """By the strict schema, which refuses unknown fields."""
    kubernetes_validate.validate(documents()[name], version, strict=True)


def test_a_misspelt_field_is_noticed() -> None:
    """The validator does refuse: a wrong type, and a field that does not exist."""
    good = documents()["PodDisruptionBudget/headrace"]
    for change in ({"maxUnavailabel": 1}, {"selector": "headrace"}):
        bad = {**good, "spec": {**good["spec"], **change}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(bad, VERSIONS[-1], strict=True)


def test_the_kustomization_names_every_file() -> None:
    """What `kubectl apply -k` applies is everything that is here, and the image is the one it renames."""
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    here = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == here
    [image] = kustomization["images"]
    assert broker()["image"] == f"{image['name']}:{image['newTag']}"


# --- how they fit together --------------------------------------------------------------------------
def test_the_services_find_the_broker() -> None:
    """Selectors match the labels of the Pod, ports exist in it, one Service is headless and its own."""
    spec = documents()["StatefulSet/headrace"]["spec"]
    labels = pod()["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in broker()["ports"]}
    services = {name: each for name, each in documents().items() if each["kind"] == "Service"}
    assert len(services) == 2
    for service in services.values():
        assert service["spec"]["selector"].items() <= labels.items()
        for port in service["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]]
    assert services[f"Service/{spec['serviceName']}"]["spec"]["clusterIP"] == "None"
    assert "clusterIP" not in services["Service/headrace"]["spec"]
    for selecting in (spec, documents()["PodDisruptionBudget/headrace"]["spec"]):
        assert selecting["selector"]["matchLabels"].items() <= labels.items()


def test_what_is_mounted_is_declared() -> None:
    """Each mount has a volume or a claim; the data is on the claim, under the image's volume."""
    claims = documents()["StatefulSet/headrace"]["spec"]["volumeClaimTemplates"]
    names = {each["name"] for each in pod()["spec"]["volumes"]}
    claimed = {claim["metadata"]["name"] for claim in claims}
    mounts = {mount["mountPath"]: mount["name"] for mount in broker()["volumeMounts"]}
    assert set(mounts.values()) == names | claimed
    image = {instruction.name: instruction.arguments for instruction in stages()[-1]}
    assert mounts[image["VOLUME"]] in claimed
    given = {each["name"]: each.get("value") for each in broker()["env"]}
    assert str(given["HEADRACE_DATA_DIR"]).startswith(f"{image['VOLUME']}/")


def test_the_user_is_that_of_the_image_and_has_no_powers() -> None:
    """Not root, a read-only root, no capabilities; the volume belongs to the same group."""
    context, own = pod()["spec"]["securityContext"], broker()["securityContext"]
    image = {instruction.name: instruction.arguments for instruction in stages()[-1]}
    assert image["USER"] == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert context["fsGroup"] == context["runAsGroup"]
    assert (context["runAsNonRoot"], own["readOnlyRootFilesystem"]) == (True, True)
    assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]})


# --- how they fit the broker ------------------------------------------------------------------------
def test_the_settings_and_ports_are_real(tmp_path: Path) -> None:
    """The broker takes the variables, and listens where the Pod says."""
    config = tmp_path / "config.json"
    config.write_text("{}")
    given = {each["name"]: each.get("value", "x" * 32) for each in broker()["env"]}
    settings = load({}, {**environment(), **given}, config)
    ports = {port["name"]: port["containerPort"] for port in broker()["ports"]}
    assert ports == {"tcp": settings.port, "http": settings.http_port}
    assert (settings.host, settings.token) == ("0.0.0.0", "x" * 32)
    assert broker()["args"] == ["serve"]


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_the_probes_ask_what_is_served(probe: str) -> None:
    """The path is a route of the HTTP port; only readiness depends on more than the process."""
    asked = broker()[probe]["httpGet"]
    assert asked["port"] == "http"
    assert asked["path"] in {route.path for route in ALL_ROUTES}
    assert asked["path"] == ("/health/ready" if probe == "readinessProbe" else "/health/live")


def test_it_has_time_to_stop() -> None:
    """The broker drains for some seconds, and then closes."""
    assert pod()["spec"]["terminationGracePeriodSeconds"] > 2 * DRAIN_S


def test_the_memory_is_enough_for_the_least_limit() -> None:
    """A quarter of the container's memory is what the broker uses for requests and caches."""
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", broker()["resources"]["limits"]["memory"]).groups()  # type: ignore[union-attr]
    size = int(number) << {"Mi": 20, "Gi": 30}[unit]
    BY_NAME["memory_limit"].read(size // 4, "the manifest")


def test_the_secret_is_the_one_that_the_documents_make() -> None:
    """The command that makes it names the same secret and key, and no secret is in the manifests."""
    [token] = [each for each in broker()["env"] if each["name"] == "HEADRACE_TOKEN"]
    reference = token["valueFrom"]["secretKeyRef"]
    command = f"create secret generic {reference['name']} --from-literal={reference['key']}="
    for text in (FOLDER / "kustomization.yaml", ROOT / "docs" / "operations.md"):
        assert command in text.read_text()
    assert not [name for name in documents() if name.startswith("Secret/")]
