"""The README's commands do what they say: each curl line and each Python block is run against a
real `logitd serve` with the bundled checkpoint."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import ServedProcess

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def curl_lines() -> list[str]:
    """Every command of the README that begins with curl, continuation lines joined."""
    commands = []
    for block in blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("curl "):
                commands.append(line)
    return commands


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with ServedProcess() as process:
        yield process


def test_there_is_something_to_run() -> None:
    assert len(curl_lines()) >= 6
    assert len(blocks("python")) >= 2


@pytest.mark.parametrize("command", curl_lines())
def test_curl_line(command: str, server: ServedProcess, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", "set -o pipefail; " + command.replace(ADDRESS, server.address)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ('{"error"' in done.stdout) == ("refused" in command)
    if "/metrics" in command:
        assert "logitd_" in done.stdout
    elif '"stream": true' in command:
        assert done.stdout.endswith("data: [DONE]\n\n")
    elif " -o " in command:
        assert any(tmp_path.iterdir()), "the README says that a file is written"
    else:
        assert json.loads(done.stdout)


@pytest.mark.parametrize("block", blocks("python"))
def test_python_block(block: str, server: ServedProcess, tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(block.replace(ADDRESS, server.address), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
