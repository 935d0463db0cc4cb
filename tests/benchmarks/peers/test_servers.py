"""Servers of others: their names, how they are started, and that nothing of them is left."""

import os
import sys
import time
from pathlib import Path

from benchmarks.peers.foreign_server import foreign_server, free_port
from benchmarks.peers.servers import (
    PeerServer,
    Room,
    llama_command,
    vllm_command,
    vllm_environment,
)

ROOM = Room(slots=32, positions=384, threads=2)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_each_is_given_the_slots_and_the_threads(tmp_path: Path) -> None:
    vllm = vllm_command(PeerServer("vllm", "float32", "python"), tmp_path, ROOM, 80)
    assert value_of(vllm, "--dtype") == "float32"
    assert value_of(vllm, "--max-num-seqs") == "32"
    assert value_of(vllm, "--model") == str(tmp_path / "huggingface")
    assert vllm_environment(ROOM)["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    llama = llama_command(PeerServer("llama-server", "int8", "x"), tmp_path / "a", ROOM, 80)
    assert value_of(llama, "-np") == "32"
    assert value_of(llama, "-c") == str(32 * 512), "whole blocks of 256 positions for each slot"
    assert value_of(llama, "-t") == value_of(llama, "-tb") == "2"


def test_a_server_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """vLLM computes in processes that its server starts: one that were left would go on taking the
    processors of whoever is measured next."""
    (tmp_path / "health").touch()
    child = tmp_path / "child"
    port = free_port()
    program = tmp_path / "server"
    program.write_text(
        f"#!/bin/sh\nsleep 600 &\necho $! > {child}\n"
        f"exec {sys.executable} -m http.server {port} --bind 127.0.0.1 -d {tmp_path}\n"
    )
    program.chmod(0o755)
    with foreign_server(
        [str(program)], port=port, log=tmp_path / "log", environment=os.environ
    ) as url:
        assert url == f"http://127.0.0.1:{port}"
        number = int(child.read_text())
        assert is_alive(number)
    end = time.monotonic() + 10
    while is_alive(number):
        assert time.monotonic() < end, "a process of the server is still there"
        time.sleep(0.02)


def is_alive(number: int) -> bool:
    """Whether there is such a process that is not merely waiting to be reaped."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
