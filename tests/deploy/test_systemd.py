"""The systemd unit: systemd accepts it, and it starts, reloads and stops `logitd serve`."""

import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from logitd.service.settings.serve import ServeSettings
from tests.e2e.server import ServedProcess
from tests.service.serving import client

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "logitd.service"
TEXT = UNIT.read_text(encoding="utf-8")


def settings_of(section: str) -> dict[str, list[str]]:
    """The lines of a section of the unit, by name."""
    body = TEXT.partition(f"\n[{section}]\n")[2].partition("\n[")[0]
    found = defaultdict(list)
    for name, value in re.findall(r"^(\w+)=(.*)$", body, re.MULTILINE):
        found[name].append(value)
    return dict(found)


SERVICE = settings_of("Service")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """The test puts an existing program into the unit, because systemd checks that the program
    exists."""
    text = TEXT.replace("/opt/logitd/.venv/bin/logitd", sys.executable)
    (tmp_path / UNIT.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_unit_starts_reloads_and_ends_a_server(checkpoint_path: Path, tmp_path: Path) -> None:
    (start,) = SERVICE["ExecStart"]
    assert start.split()[1:] == [
        "serve"
    ]  # as in ServedProcess; all else comes from the environment
    (reload,) = SERVICE["ExecReload"]
    number = signal.Signals[f"SIG{reload.split()[1].removeprefix('-')}"]
    keys = tmp_path / "keys"
    keys.write_text("ann=the-key-of-ann\n")
    named = dict(re.findall(r"^#   (LOGITD_\w+)=(.*)$", TEXT, re.MULTILINE))
    known = {ServeSettings.variables(field)[1] for field in ServeSettings.model_fields}
    assert named.keys() <= known
    values = {"LOGITD_CHECKPOINT": str(checkpoint_path), "LOGITD_API_KEY_FILE": str(keys)}
    assert named.keys() == values.keys()
    environment = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path), **values}
    with ServedProcess("--threads", "1", environment=environment, cwd=tmp_path) as server:
        keys.write_text("bob=the-key-of-bob\n")
        server.signal(number)
        server.wait_for("the keys of bob are accepted now")
        with client(server.url) as http:
            headers = {"Authorization": "Bearer the-key-of-bob"}
            assert http.get("/info", headers=headers).status_code == 200
        server.signal(signal.SIGTERM)  # systemd's default
        assert server.exit_code() == 0
    assert "KillSignal" not in SERVICE
    assert SERVICE["Restart"] == ["on-failure"]


def test_unit_leaves_requests_time_to_finish() -> None:
    drain = ServeSettings.model_fields["drain_timeout"].default
    assert int(SERVICE["TimeoutStopSec"][0]) > drain + 5
