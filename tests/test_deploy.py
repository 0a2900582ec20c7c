"""What is shipped to run and watch a broker: the image, the compose file, the alerts, the dashboard.

Files parse and fit together, every metric and label they use is in a real scrape, the settings exist, and
the health check that the image declares is run against a server. ``tests/deploy`` has more: it runs the steps
of the Dockerfile, and checks the manifests for Kubernetes and the unit of systemd. PromQL itself is checked by ``promtool`` where it
is installed (Debian: the package ``prometheus``); the tests that need it say so when they are skipped.
"""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headrace.errors import InvalidArgument
from headrace.server.server import check_exposure
from headrace.settings import BY_NAME, SETTINGS, load
from headrace.testing import running_server
from tests.deploy.dockerfile import Instruction, environment, instructions, stages

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/headrace.json"
OF_PROMETHEUS = {"instance", "job"}
"""Labels that Prometheus adds to whatever it scrapes."""
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: PromQL is not checked beyond its names"
)


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in read_yaml(DEPLOY / "alerts.yml")["groups"] for rule in group["rules"]]


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def targets() -> Iterator[dict[str, Any]]:
    for panel in dashboard()["panels"]:
        yield from panel.get("targets", ())


def plain(expression: str) -> str:
    """Without what Grafana fills in."""
    for name, value in (("$__rate_interval", "5m"), ("$__interval", "1m")):
        expression = expression.replace(name, value)
    return re.sub(r"\$\w+", ".*", expression)


def expressions() -> dict[str, str]:
    """Every PromQL expression, by where it stands."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in rules()}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            found[f"panel {panel['id']} {panel['title']} {target['refId']}"] = target["expr"]
    return {place: plain(expression) for place, expression in found.items()}


@pytest.fixture(scope="module")
def scrape() -> dict[str, set[str]]:
    """The labels of every sample that a broker exposes once it has done everything."""
    with running_server() as server, server.client() as client:
        client.create_subscription("email", "orders", max_deliveries=1)
        client.publish("orders", b"one")
        consumer = client.subscription("email", "orders")
        consumer.get(10).nack()
        client.flush()
        server.wait_until(lambda: any(server.engine.dead_letters.topics()))
        run = {"state": "running", "run_id": "r", "started_at": 1}
        client.report_pipeline("daily", {**run, "queries": [{"name": "q", "batch_id": 1}]})
        host, port = server.server.addresses["http"]
        with urllib.request.urlopen(f"http://{host}:{port}/metrics") as answer:
            text = answer.read().decode()
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# --- what Prometheus and Grafana read -------------------------------------------------------------
@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yml")), ids=lambda p: p.name)
def test_every_yaml_file_parses(path: Path) -> None:
    """Each is a mapping."""
    assert isinstance(read_yaml(path), dict)


@pytest.mark.parametrize(("place", "expression"), expressions().items())
def test_every_metric_and_label_is_exposed(
    place: str, expression: str, scrape: dict[str, set[str]]
) -> None:
    """What a panel or an alert asks for is what the broker has, so nothing shows "no data" for ever."""
    names = re.findall(r"\b(?:message_broker|headrace_pipeline)_\w+", expression)
    assert names or "up{" in expression
    for name in names:
        assert name in scrape, f"{place} uses {name}"
    known = OF_PROMETHEUS.union(*(scrape[name] for name in names))
    for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', selector)):
            assert label in scrape.get(name, set()) | OF_PROMETHEUS, f"{place}: {name} by {label}"
    for labels in re.findall(r"\bby \(([^)]*)\)", expression):
        assert set(re.split(r",\s*", labels)) <= known, f"{place}: by ({labels})"


@pytest.mark.parametrize(("place", "expression"), expressions().items())
def test_brackets_and_quotes_are_closed(place: str, expression: str) -> None:
    """The least that can be said of PromQL without its parser."""
    bare = re.sub(r'"[^"]*"', "", expression)
    assert '"' not in bare
    opened = []
    for character in bare:
        if character in "([{":
            opened.append(")]}"["([{".index(character)])
        elif character in ")]}":
            assert opened.pop() == character, place
    assert not opened, place


@pytest.mark.parametrize("label", [target["legendFormat"] for target in targets()])
def test_legends_name_labels_that_are_kept(label: str) -> None:
    """A legend's {{label}} is one that its expression groups by, or one of the broker itself."""
    for target in targets():
        if target["legendFormat"] == label:
            kept = {"instance", "le"}
            for labels in re.findall(r"\bby \(([^)]*)\)", target["expr"]):
                kept |= set(re.split(r",\s*", labels))
            assert set(re.findall(r"\{\{(\w+)\}\}", label)) <= kept, target["expr"]


def test_alerts_say_what_they_mean() -> None:
    """Each has a name of its own, a severity and a summary; and a history that raises it."""
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 10
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
    histories = (DEPLOY / "alerts_test.yml").read_text()
    assert [name for name in names if f'alertname="{name}"' not in histories] == []


def test_prometheus_finds_the_alerts_and_the_broker() -> None:
    """The files and the address are those of the compose file."""
    config = read_yaml(DEPLOY / "prometheus.yml")
    assert [name for name in config["rule_files"] if not (DEPLOY / name).is_file()] == []
    [job] = config["scrape_configs"]
    assert job["job_name"] == "headrace"  # as the alert HeadraceDown has it
    [target] = job["static_configs"][0]["targets"]
    services = read_yaml(DEPLOY / "docker-compose.yml")["services"]
    service, port = target.split(":")
    assert service in services
    assert int(port) == BY_NAME["http_port"].default


def test_the_dashboard_fits_together() -> None:
    """Panels have ids of their own, do not lie on each other, and ask the source that is provisioned."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    [source] = read_yaml(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert {target["datasource"]["uid"] for target in targets()} == {source["uid"]}
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", DASHBOARD.read_text()))
    assert {name for name in used if not name.startswith("__")} == variables


def promtool(*arguments: object) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_config() -> None:
    """Prometheus would start with it."""
    promtool("check", "config", "--syntax-only", DEPLOY / "prometheus.yml")


@needs_promtool
def test_promtool_raises_each_alert_and_none_on_a_quiet_day() -> None:
    """The histories of alerts_test.yml."""
    promtool("check", "rules", DEPLOY / "alerts.yml")
    promtool("test", "rules", DEPLOY / "alerts_test.yml")


@needs_promtool
def test_promtool_parses_every_panel(tmp_path: Path) -> None:
    """Each expression of the dashboard, as if it were a recording rule."""
    recorded = [{"record": f"e{n}", "expr": e} for n, e in enumerate(expressions().values())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    promtool("check", "rules", path)


# --- the compose file -----------------------------------------------------------------------------
def services() -> dict[str, Any]:
    found = read_yaml(DEPLOY / "docker-compose.yml")["services"]
    assert isinstance(found, dict)
    return found


def test_no_port_is_open_to_others() -> None:
    """Everything is published on the loopback address alone."""
    ports = [port for service in services().values() for port in service["ports"]]
    assert len(ports) == 4
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_what_is_mounted_is_there() -> None:
    """Files of this directory exist, and named volumes are declared."""
    declared = read_yaml(DEPLOY / "docker-compose.yml")["volumes"]
    for service in services().values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in declared
    inner = {v.split(":")[1] for v in services()["grafana"]["volumes"]}
    [provider] = read_yaml(DEPLOY / "grafana/provisioning/dashboards/headrace.yml")["providers"]
    assert provider["options"]["path"] in inner


def test_images_have_a_version_and_no_host() -> None:
    """What is pulled is named exactly; the broker is built here."""
    for name, service in services().items():
        image, colon, version = service["image"].partition(":")
        assert image.count("/") <= 1
        assert "." not in image
        assert "build" in service if name == "broker" else colon and version[0] in "v123456789"
    assert (DEPLOY / services()["broker"]["build"] / "Dockerfile").is_file()


def test_the_broker_is_told_what_it_knows(tmp_path: Path) -> None:
    """Every variable is a setting, and with their defaults it starts."""
    given = services()["broker"]["environment"]
    defaults = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in given.items()}
    config = tmp_path / "config.json"
    config.write_text("{}")
    check_exposure(load({}, {**image_environment(), **defaults}, config))
    known = {name for setting in SETTINGS for name in setting.environment}
    assert {name for name in given if not name.startswith("HEADRACE_")} <= known


def test_the_compose_file_at_the_root_is_this_one() -> None:
    """`docker-compose up -d` in the checkout starts what is described here."""
    assert read_yaml(ROOT / "docker-compose.yml") == {"include": ["deploy/docker-compose.yml"]}


# --- the image ------------------------------------------------------------------------------------
def final_stage() -> list[Instruction]:
    return stages()[-1]


def image_environment() -> dict[str, str]:
    return {n: v for n, v in environment().items() if n.startswith("HEADRACE_")}


def test_the_instructions_are_known_and_in_order() -> None:
    """No misspelt one; the last USER is not root, and it stands before what runs."""
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL"}
    known |= {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
    names = [name for name, _ in instructions()]
    assert set(names) <= known
    assert names[0] == "FROM"
    stage = dict(final_stage())
    assert int(stage["USER"].split(":")[0]) > 0  # a number, which Kubernetes can compare with root
    order = [name for name, _ in final_stage()]
    assert order.index("RUN") < order.index("USER") < order.index("ENTRYPOINT")
    assert stage["VOLUME"] == image_environment()["HEADRACE_DATA_DIR"]
    assert [*json.loads(stage["ENTRYPOINT"]), *json.loads(stage["CMD"])] == ["headrace", "serve"]


def test_the_ports_are_the_defaults() -> None:
    """EXPOSE names what the broker listens on when it is told nothing."""
    exposed = {int(port) for port in dict(final_stage())["EXPOSE"].split()}
    assert exposed == {BY_NAME["port"].default, BY_NAME["http_port"].default}


def test_what_is_copied_is_there_and_not_ignored() -> None:
    """The build sees exactly the files that it copies."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    copied = set()
    for name, arguments in instructions():
        if name == "COPY" and not arguments.startswith("--from="):
            copied |= set(arguments.split()[:-1])
    assert copied == let_through
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_it_listens_to_everybody_only_when_told_how(tmp_path: Path) -> None:
    """Without a token the image refuses to start; with one, or HEADRACE_INSECURE, it does."""
    config = tmp_path / "config.json"
    config.write_text("{}")
    environment = image_environment()
    assert environment["HEADRACE_HOST"] == "0.0.0.0"
    with pytest.raises(InvalidArgument) as caught:
        check_exposure(load({}, environment, config))
    assert caught.value.code == "authentication_required"
    for given in ({"HEADRACE_TOKEN": "secret-of-the-tests"}, {"HEADRACE_INSECURE": "true"}):
        check_exposure(load({}, {**environment, **given}, config))


@pytest.mark.parametrize("settings", [{}, {"token": "secret"}])
def test_the_health_check_tells_a_live_broker_from_a_dead_one(settings: dict[str, str]) -> None:
    """The very command of the image, with or without a token; then with nobody there."""
    arguments = dict(final_stage())["HEALTHCHECK"]
    command = json.loads(arguments[arguments.index("CMD ") + 4 :])
    assert command[0] == "python"

    def check(port: int) -> int:
        words = [word.replace("8080", str(port)) for word in command[1:]]
        return subprocess.run(
            [sys.executable, *words], capture_output=True, timeout=30, check=False
        ).returncode

    with running_server(memory=True, **settings) as server:
        port = server.server.addresses["http"][1]
        assert check(port) == 0
    assert check(port) != 0
