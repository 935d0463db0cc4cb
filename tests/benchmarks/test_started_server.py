"""The server runs during the block, gets only its flags as settings, and is gone after the block,
even after an error."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.started_server import ServerError, started_server
from tests.service.serving import TEST_TIMEOUT, client


def flags(checkpoint: Path) -> tuple[str, ...]:
    return ("--checkpoint", str(checkpoint), "--threads", "1", "--kernels", "torch")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_server_runs_during_the_block_and_stops_after_an_error(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The environment and a .env file may hold settings of another server; they are ignored. Signal
    handlers are restored."""
    monkeypatch.setenv("LOGITD_API_KEYS", "ci=0123456789abcdef")
    monkeypatch.setenv("LOGITD_HOST", "0.0.0.0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("LOGITD_MAX_QUEUE=1\n")
    before, begun = signal.getsignal(signal.SIGTERM), []

    def fail() -> None:
        with started_server(*flags(checkpoint_path), "--slots", "3") as server:
            begun.append(server)
            assert signal.getsignal(signal.SIGTERM) is not before
            assert server.url.startswith("http://127.0.0.1:")
            with client(server.url) as http:
                info = http.get("/info").json()
            assert (info["slots"], info["api_keys"]) == (3, False)
            assert info["limits"]["max_queue"] == 256
            assert alive(server.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    (server,) = begun
    assert signal.getsignal(signal.SIGTERM) is before
    assert not alive(server.pid)
    with pytest.raises(httpx.ConnectError), client(server.url) as http:
        http.get("/health")


@pytest.mark.slow
def test_failed_start_is_explained(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"ended with 1 before it was ready") as caught,
        started_server("--checkpoint", str(tmp_path / "nowhere")),
    ):
        pytest.fail("nothing is served")
    assert "nowhere does not exist" in str(caught.value)


PROGRAM = """
import signal, sys, time
from benchmarks.started_server import started_server
hangup, *flags = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.Handlers[hangup])
with started_server(*flags) as server:
    print(server.pid, signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)
    time.sleep(600)
"""
"""Measures until it is ended. Its first argument says how it handles SIGHUP. It prints the server's
pid and whether hangups are ignored."""


def measuring(hangup: str, checkpoint: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, hangup, *flags(checkpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hangup", "number", "code"),
    [
        ("SIG_DFL", signal.SIGHUP, 128 + signal.SIGHUP),
        ("SIG_DFL", signal.SIGINT, -signal.SIGINT),
        ("SIG_IGN", signal.SIGTERM, 128 + signal.SIGTERM),
    ],
)
def test_signal_ends_command_and_server(
    checkpoint_path: Path, hangup: str, number: signal.Signals, code: int
) -> None:
    """An ignored hangup stays ignored, as under nohup."""
    process = measuring(hangup, checkpoint_path)
    assert process.stdout is not None
    with process.stdout as out:
        pid, ignored = out.readline().split()
        assert (ignored == "True") == (hangup == "SIG_IGN")
        assert alive(int(pid))
        process.send_signal(number)
        assert process.wait(TEST_TIMEOUT) == code
    assert not alive(int(pid))
