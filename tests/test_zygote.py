"""The zygote: what it forks is a `logitd` in a process of its own, and nothing of it stays."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from logitd.model.version import VERSION
from tests import zygote
from tests.e2e.server import ServedProcess
from tests.zygote import ForkedProcess, completed


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["--version"], 0, f"logitd {VERSION}\n", ""),
        (["inspect", "nowhere"], 1, "", "nowhere"),
        (["serve", "--slots", "0"], 2, "", "--slots: Input should be greater than or equal to 1"),
    ],
)
def test_command_prints_and_exits_as_it_does_by_itself(
    arguments: list[str], code: int, out: str, err: str
) -> None:
    done = completed(arguments)
    assert (done.returncode, done.stdout) == (code, out)
    assert err in done.stderr


def test_forked_process_has_its_folder_environment_and_limit(
    checkpoint_path: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "LOGITD_SLOTS": "3"}
    (tmp_path / "tiny").symlink_to(checkpoint_path)
    with ServedProcess(
        "--checkpoint",
        "tiny",
        "--threads",
        "1",
        cwd=tmp_path,
        environment=environment,
        descriptors=200,
    ) as server:
        assert "3 sequences at once" in server.output
        process = Path(f"/proc/{server.process.pid}")
        if process.exists():
            assert (process / "cwd").readlink() == tmp_path
            assert "Max open files            200" in (process / "limits").read_text()
    assert server.process.returncode == 0


def test_signal_ends_it_and_is_told(checkpoint_path: Path) -> None:
    with ServedProcess("--checkpoint", str(checkpoint_path), "--threads", "1") as server:
        server.signal(signal.SIGKILL)
        assert server.exit_code() == -signal.SIGKILL
        server.signal(signal.SIGTERM)  # to nobody
    with pytest.raises(ProcessLookupError):
        os.kill(server.process.pid, 0)


def test_waiting_has_an_end(checkpoint_path: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        flags = ("serve", "--port", "0", "--checkpoint", checkpoint_path, "--threads", "1")
        process = ForkedProcess([*map(str, flags)], stdout=log.fileno(), stderr=log.fileno())
    try:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
    finally:
        process.kill()
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_after_the_end_of_a_zygote_there_is_another() -> None:
    completed(["--version"])
    before = zygote._zygote()[1]
    zygote.end()
    assert before.returncode == 0
    assert completed(["--version"]).returncode == 0
