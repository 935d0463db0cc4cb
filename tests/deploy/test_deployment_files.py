"""deploy/, docker-compose.yml and the Dockerfile name only existing metrics, files and settings."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana.make_dashboard import PLACE, dashboard
from logitd.model.inference.kernels.cpu.targets import targets_of
from logitd.service.metrics.metrics import Metrics
from logitd.service.settings.serve import ServeSettings

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = ALERTS["groups"][0]["rules"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
QUERIES = [
    (panel["title"], target["expr"])
    for panel in dashboard()["panels"]
    for target in panel.get("targets", ())
]


def known_names() -> set[str]:
    """Names of all series in a scrape, including series without a value."""
    names = {"up"}
    metrics = Metrics(callers=["ann"])
    metrics.of("a model")
    for family in text_string_to_metric_families(metrics.render().decode()):
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
        names |= {family.name + suffix for suffix in suffixes.get(family.type, ("",))}
    return names


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:logitd|process)_\w+|\bup\b", query))


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_panel_queries_existing_metrics(title: str, query: str) -> None:
    assert names_in(query)
    assert names_in(query) <= known_names(), title


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_queries_existing_metrics_and_gives_advice(rule: dict[str, Any]) -> None:
    assert names_in(rule["expr"])
    assert names_in(rule["expr"]) <= known_names()
    assert set(rule["annotations"]) == {"summary", "action"}
    assert rule["labels"]["severity"] in ("page", "ticket")


def test_unknown_metric_is_found() -> None:
    assert not names_in("rate(logitd_tokens_total[5m])") <= known_names()


def test_every_alert_has_a_test() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in RULES}


def test_dashboard_is_generated_from_its_panels() -> None:
    assert json.loads(PLACE.read_text(encoding="utf-8")) == dashboard(), (
        "python deploy/grafana/make_dashboard.py"
    )


# docker-compose.yml


def mounted() -> list[str]:
    return [
        volume.split(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service.get("volumes", ())
        if volume.startswith("./")
    ]


def test_compose_mounts_exist() -> None:
    there = [path for path in mounted() if path != "./runs"]  # created by compose
    assert "./checkpoints" in there
    for path in there:
        assert (ROOT / path).exists(), path


def test_every_setting_passes_through_and_the_container_keeps_its_port() -> None:
    known = {ServeSettings.variables(field)[1] for field in ServeSettings.model_fields}
    for name in ("logitd", "replica-1", "replica-2"):
        service = COMPOSE["services"][name]
        assert service["env_file"] == [{"path": ".env", "required": False}]
        assert service["environment"].keys() <= known
        assert service["environment"]["LOGITD_PORT"] == "8000"
        assert "./runs:/runs:ro" in service["volumes"]


def test_compose_starts_one_service_on_the_loopback() -> None:
    services = COMPOSE["services"]
    assert {name for name in services if "profiles" not in services[name]} == {"logitd"}
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
        if service["image"] == "logitd":
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]


def test_prometheus_and_the_balancer_know_the_replicas() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    (scraped,) = config["scrape_configs"]
    (found,) = scraped["dns_sd_configs"]
    assert set(found["names"]) == {"logitd", "replica-1", "replica-2"} <= set(COMPOSE["services"])
    replicas = (ROOT / "deploy" / "balancer" / "replicas.conf").read_text(encoding="utf-8")
    assert re.findall(r"server (\S+):8000", replicas) == ["replica-1", "replica-2"]


def test_container_may_stop_later_than_its_requests() -> None:
    drain = ServeSettings.model_fields["drain_timeout"].default
    assert float(COMPOSE["services"]["logitd"]["stop_grace_period"].rstrip("s")) > drain + 5


# Dockerfile


def stage(name: str) -> list[str]:
    """The instructions of one build stage of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    (body,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM )", text, flags=re.S | re.M)
    return [line for line in body.splitlines() if line and not line.startswith("#")]


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler is installed")
def test_stage_of_the_kernels_has_all_that_it_needs(tmp_path: Path) -> None:
    """Run the stage's COPY and RUN lines in an empty folder, without Python packages and with a
    short source file in place of the decoder."""
    for line in stage("kernels"):
        if line.startswith("COPY "):
            *sources, place = line.split()[1:]
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, tmp_path / place, symlinks=True)
                else:
                    (tmp_path / place).mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / source, tmp_path / place)
    cpu = tmp_path / "model/inference/kernels/cpu"
    shutil.rmtree(cpu / "prebuilt", ignore_errors=True)  # another user's file
    (cpu / "native/decoder.cpp").write_text('extern "C" int answer() { return 42; }\n')
    (command,) = [line for line in stage("kernels") if line.startswith("RUN python3 ")]
    subprocess.run(
        [sys.executable, "-S", *command.split()[2:]],
        cwd=tmp_path, check=True, env={"PATH": os.environ["PATH"]}, timeout=100,
    )  # fmt: skip
    built = {path.name.rpartition("-")[0] for path in (cpu / "prebuilt").iterdir()}
    assert built == {f"kernels-{target.name}" for target in targets_of(platform.machine())}
    (handed,) = [line for line in stage("build") if "--from=kernels" in line]
    assert handed.split()[2:] == [
        "/src/model/inference/kernels/cpu/prebuilt",
        "model/inference/kernels/cpu/prebuilt",
    ]
