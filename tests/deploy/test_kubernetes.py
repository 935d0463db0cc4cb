"""The Kubernetes manifests: their settings, probes and training jobs, checked against the API's
schemas. If kubectl is installed, the tests also build the manifests with it.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.service.application.app import create_app
from logitd.service.settings.serve import ServeSettings
from tests.model.conftest import story
from tests.service.serving import serve_settings

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
BUILDS = ("overlays/cpu", "overlays/gpu", "overlays/follow", "training")
LITERALS = [
    literal.split("=", 1)
    for path in KUBERNETES.rglob("kustomization.yaml")
    for generator in yaml.safe_load(path.read_text(encoding="utf-8")).get("configMapGenerator", ())
    for literal in generator["literals"]
]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")


def read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((KUBERNETES / path).read_text(encoding="utf-8"))
    return found


def built(folder: Path) -> str:
    return subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def validated(text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kubernetes_validate", "-k", "1.34", "--strict", "-"]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=60
    )


@needs_kubectl
@pytest.mark.parametrize("name", BUILDS)
def test_manifests_fit_the_schemas_of_the_api(name: str) -> None:
    done = validated(built(KUBERNETES / name))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_kubectl
def test_misspelled_field_is_found() -> None:
    text = built(KUBERNETES / "overlays/cpu")
    assert validated(text.replace("readinessProbe", "readynessProbe")).returncode != 0


@needs_kubectl
def test_components_fit_an_overlay(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    mine = tmp_path / "kubernetes" / "overlays" / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../cpu]\n"
        "components: [../../components/monitoring, ../../components/autoscaling]\n"
    )
    parts = list(yaml.safe_load_all(built(mine)))
    kinds = {part["kind"]: part for part in parts}
    assert {"PodMonitor", "HorizontalPodAutoscaler"} < kinds.keys()
    assert "replicas" not in kinds["Deployment"]["spec"], "the autoscaler sets it"
    core = [part for part in parts if part["kind"] != "PodMonitor"]
    assert validated(yaml.safe_dump_all(core)).returncode == 0


@pytest.mark.parametrize(("name", "value"), LITERALS)
def test_setting_is_one_of_serve(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field = name.removeprefix("LOGITD_").lower()
    given = getattr(ServeSettings.model_validate({field: value}), field)
    (said,) = map(str, given if isinstance(given, tuple) else [given])
    assert said in (value, f"{value}.0")


def test_pod_has_the_time_that_a_server_takes_to_leave() -> None:
    pod = read("base/deployment.yaml")["spec"]["template"]["spec"]
    given = dict(LITERALS)
    leaving = float(given["LOGITD_DRAIN_GRACE"]) + float(given["LOGITD_DRAIN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] > leaving + 5
    assert pod["enableServiceLinks"] is False, "a Service called logitd would set LOGITD_PORT"
    (container,) = pod["containers"]
    probe = container["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < float(given["LOGITD_DRAIN_GRACE"])


def test_probes_use_existing_endpoints(checkpoint_path: Path) -> None:
    paths = create_app(serve_settings(checkpoint_path)).openapi()["paths"]
    (container,) = read("base/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
    (endpoint,) = read("components/monitoring/podmonitor.yaml")["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] in paths


# The training


def node(command: list[str], rank: int, folder: Path, port: int) -> subprocess.Popen[str]:
    """Run the job's command as on one of the two machines, with the values that Kubernetes would
    fill in."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    filled = [
        word.replace("$(JOB_COMPLETION_INDEX)", str(rank))
        .replace("logitd-train-0.logitd-train", "127.0.0.1")
        .replace("29500", str(port))
        .replace("/runs", str(folder))
        .replace("--preset small", f"--preset tiny --steps 4 --data {folder}/text.txt --threads 1")
        for word in command
    ]
    return subprocess.Popen(
        filled, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PATH": programs, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_job_trains_on_two_machines_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(story(600), encoding="utf-8")
    spec = read("training/job.yaml")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert f"--nnodes={spec['completions']}" in container["command"]
    command = [*container["command"], *container["args"]]
    weights = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        nodes = [node(command, rank, tmp_path, port) for rank in range(spec["completions"])]
        said = [process.communicate(timeout=240)[0] for process in nodes]
        assert [process.returncode for process in nodes] == [0, 0], said
        info = read_checkpoint(tmp_path / "mine" / "latest")
        assert info.training.step == 4
        weights.append(info.weights_sha256)
    assert weights[0] == weights[1], "the second run resumed the first"
