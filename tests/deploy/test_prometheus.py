"""Prometheus accepts the configuration and scrapes a server, the unit tests of the alerts pass, and
the dashboard's queries return values. Needs Debian's package `prometheus`."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.grafana.make_dashboard import dashboard
from tests.e2e.server import ServedProcess
from tests.service.serving import at_work, eventually

PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"
KEY = "a-key-for-prometheus"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("promtool") is None or shutil.which("prometheus") is None,
        reason="prometheus is not installed",
    ),
]


def promtool(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments],
        cwd=PROMETHEUS, input=stdin, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_rules(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def server(checkpoint_path: Path) -> Iterator[ServedProcess]:
    with ServedProcess(str(checkpoint_path), "--api-keys", f"prometheus={KEY}") as process:
        yield process


@contextmanager
def load(url: str) -> Iterator[None]:
    """Two clients that send requests during the block."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}) as client:

        def ask(_: int) -> None:
            client.post("/generate", json={"prompt": "a", "max_tokens": 20, "n": 2})
            client.post("/probs", json={"prompt": "abc"})

        with at_work(ask, 2):
            yield


def test_promtool_accepts_the_metrics(server: ServedProcess) -> None:
    with load(server.url):
        time.sleep(0.3)
    headers = {"Authorization": f"Bearer {KEY}"}
    text = httpx.get(f"{server.url}/metrics", headers=headers).text
    done = promtool("check", "metrics", stdin=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stdout + done.stderr


@contextmanager
def prometheus(target: str, folder: Path, port: int) -> Iterator[httpx.Client]:
    """Prometheus with the shipped configuration, except for its target and intervals."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    (folder / "key").write_text(KEY)
    job["authorization"] = {"credentials_file": str(folder / "key")}
    job["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(PROMETHEUS / "alerts.yml", folder)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml",
             f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1") as client:

            def ready() -> bool:
                with suppress(httpx.ConnectError):
                    return client.get("/targets").status_code == 200
                return False

            eventually(ready)
            yield client
    finally:
        process.terminate()
        process.wait(30)


def query(client: httpx.Client, expression: str) -> list[Any]:
    """The current series of an expression."""
    filled = expression.replace("$__rate_interval", "2s")
    for name in ("$instance", "$model"):
        filled = filled.replace(name, ".+")
    reply = client.get("/query", params={"query": filled}).json()
    assert reply["status"] == "success", (filled, reply)
    found: list[Any] = reply["data"]["result"]
    return found


def test_every_panel_shows_something_under_load(
    server: ServedProcess, tmp_path: Path, free_port: int
) -> None:
    target = server.url.removeprefix("http://")
    with prometheus(target, tmp_path, free_port) as client, load(server.url):
        eventually(lambda: bool(query(client, "rate(logitd_generation_tokens_total[2s]) > 0")))
        eventually(lambda: bool(query(client, "rate(logitd_step_batch_size_count[2s]) > 0")))
        time.sleep(1)
        empty = [
            (panel["title"], target["expr"])
            for panel in dashboard()["panels"]
            for target in panel.get("targets", ())
            if not query(client, target["expr"])
        ]
        assert empty == []
        (ready,) = query(client, "logitd_ready")
        assert ready["value"][1] == "1"
        rules = client.get("/rules").json()["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}, json.dumps(rules)
        assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
