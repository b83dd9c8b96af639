# SPDX-License-Identifier: Apache-2.0
"""What deploy/ ships, checked without a container engine: Prometheus files by promtool itself, the alert rules by their
unit tests, the dashboard, the compose file and the Dockerfile by what they must say to fit each other."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = ROOT / "build" / "tools" / "usr" / "bin"
METRICS_PORT = 9464
# docs/OPERATIONS.md lists every metric; dashboards and alerts may use no other.
OPERATIONS = (ROOT / "docs" / "OPERATIONS.md").read_text()


def promtool(*arguments):
    program = shutil.which("promtool") or shutil.which("promtool", path=str(TOOLS))
    assert program, "promtool is missing: run scripts/test.sh, which unpacks it into build/tools"
    return subprocess.run([program, *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [
    ("check", "config", "prometheus.yml"),
    ("check", "rules", "alerts.yml"),
    ("test", "rules", "alerts_test.yml"),
], ids=" ".join)
def test_promtool(arguments):
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def load(*parts):
    return yaml.safe_load(DEPLOY.joinpath(*parts).read_text())


def alerts():
    return [rule for group in load("prometheus", "alerts.yml")["groups"] for rule in group["rules"]]


def dashboard():
    return json.loads((DEPLOY / "grafana" / "dashboards" / "attnd.json").read_text())


def dashboard_queries():
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def documented_metrics():
    return set(re.findall(r"^\| `(attnd_[a-z_]+)", OPERATIONS, re.MULTILINE))


def metrics_in(expression):
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"attnd_[a-z_]+", expression)}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alert(rule):
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    file, anchor = rule["annotations"]["runbook"].split("#")
    assert (ROOT / file).exists()
    assert anchor == rule["alert"].lower()
    assert f"### {rule['alert']}\n" in OPERATIONS
    assert metrics_in(rule["expr"]) <= documented_metrics()
    tested = {case["alertname"]: bool(case["exp_alerts"]) for test in load("prometheus", "alerts_test.yml")["tests"]
              for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert tested.get(rule["alert"]), "no unit test makes this alert fire"


def test_dashboard():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    sources = {source["uid"] for source in load("grafana", "provisioning", "datasources", "prometheus.yaml")["datasources"]}
    for panel in panels:
        assert panel["title"] and panel["description"] and panel["targets"]
        assert {panel["datasource"]["uid"], *(target["datasource"]["uid"] for target in panel["targets"])} <= sources
        place = panel["gridPos"]
        assert 0 <= place["x"] and place["x"] + place["w"] <= 24
    taken = [(x, y) for panel in panels for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
             for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])]
    assert len(taken) == len(set(taken)), "panels overlap"


@pytest.mark.parametrize("query", dashboard_queries())
def test_dashboard_query(query):
    assert metrics_in(query) and metrics_in(query) <= documented_metrics()
    assert 'instance=~"$instance"' in query
    # Counters end in _total and are rated, never shown raw.
    for name in re.findall(r"attnd_[a-z_]+_total", query):
        assert f"rate({name}{{" in query


def test_every_documented_metric_is_watched():
    watched = set().union(*(metrics_in(query) for query in dashboard_queries()),
                          *(metrics_in(rule["expr"]) for rule in alerts()))
    assert documented_metrics() == watched


def instructions(text):
    """The Dockerfile's instructions, one string each, with continuations joined."""
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [line.strip() for line in joined.split("\n") if line.strip()]


@pytest.fixture(name="dockerfile")
def dockerfile_fixture():
    return instructions((ROOT / "Dockerfile").read_text())


def stages(dockerfile):
    result = []
    for line in dockerfile:
        if line.startswith("FROM "):
            result.append([])
        result[-1].append(line)
    return result


def value(stage, word):
    found = [line.split(" ", 1)[1].strip() for line in stage if line.startswith(word + " ")]
    assert len(found) == 1, (word, found)
    return found[0]


def test_dockerfile_stages(dockerfile):
    build, runtime = stages(dockerfile)
    words = {line.split(" ")[0] for line in dockerfile}
    assert words <= {"FROM", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert build[0] == "FROM debian:12-slim AS build" and runtime[0] == "FROM debian:12-slim"
    # Compilers and headers stay in the build stage; packages come from the project's one list.
    assert "ATTND_BUILD_PACKAGES" in " ".join(build) and "runtime_packages.sh" in " ".join(build)
    assert "-dev" not in " ".join(runtime) and "g++" not in " ".join(runtime)
    assert value(runtime, "USER") == "attnd"
    for line in runtime:
        if line.startswith("COPY --from="):
            assert line.startswith("COPY --from=build /src/build/")
        elif line.startswith("COPY "):
            assert (ROOT / line.split()[1]).exists()


def test_dockerfile_runs_the_server_where_the_volumes_are(dockerfile):
    runtime = stages(dockerfile)[1]
    volumes = json.loads(value(runtime, "VOLUME"))
    command = json.loads(value(runtime, "CMD"))
    # Inside the container: what is published is the compose file's matter.
    assert command.pop() == "--allow-remote-metrics"
    flags = dict(zip(command[::2], command[1::2]))
    assert set(flags) == {"--listen", "--data-dir", "--metrics-listen"}
    socket = flags["--listen"].removeprefix("unix:")
    assert str(pathlib.PurePath(socket).parent) in volumes
    assert flags["--data-dir"] in volumes
    assert flags["--metrics-listen"].endswith(f":{METRICS_PORT}") and value(runtime, "EXPOSE") == str(METRICS_PORT)
    health = value(runtime, "HEALTHCHECK")
    probe = json.loads(health[health.index("["):])
    assert probe == ["/usr/local/bin/attnd", "--probe", flags["--listen"]]
    assert json.loads(value(runtime, "ENTRYPOINT")) == ["/usr/local/bin/attnd"]


def test_dockerignore_keeps_what_the_build_reads():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and not line.startswith("#")]
    for needed in ("CMakeLists.txt", "CMakePresets.json", "cmake", "common", "attention", "storage", "engine", "proto", "server", "ctl",
                   "client", "client/cpp", "scripts", "LICENSE"):
        assert needed not in ignored
    assert {"build", ".git"} <= set(ignored)


def test_compose(dockerfile):
    compose = load("compose.yaml")
    services = compose["services"]
    assert set(services) == {"attnd", "prometheus", "grafana"}
    for name, service in services.items():
        assert "build" in service or not service["image"].endswith(":latest"), f"{name}: image without a version"
        for published in service.get("ports", []):
            assert published.startswith("127.0.0.1:"), f"{name} is published beyond loopback"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_dir()
                assert volume.endswith(":ro")
            else:
                assert source in compose["volumes"]
        for other in service.get("depends_on", []):
            assert other in services
    attnd = services["attnd"]
    assert (DEPLOY / attnd["build"]["context"] / "Dockerfile").exists()
    assert attnd["read_only"] and attnd["cap_drop"] == ["ALL"]
    assert int(attnd["stop_grace_period"].removesuffix("s")) > 10
    mounted = {volume.split(":")[1] for volume in attnd["volumes"]}
    assert mounted == set(json.loads(value(stages(dockerfile)[1], "VOLUME")))


def test_the_scrape_finds_the_server():
    (scrape,) = load("prometheus", "prometheus.yml")["scrape_configs"]
    assert scrape["job_name"] == "attnd"
    assert scrape["static_configs"] == [{"targets": [f"attnd:{METRICS_PORT}"]}]


def test_grafana_finds_prometheus_and_the_dashboard():
    (source,) = load("grafana", "provisioning", "datasources", "prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load("grafana", "provisioning", "dashboards", "attnd.yaml")["providers"]
    mounts = [volume.split(":")[:2] for volume in load("compose.yaml")["services"]["grafana"]["volumes"]]
    assert ["./grafana/dashboards", provider["options"]["path"]] in mounts
