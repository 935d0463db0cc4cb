"""Servers of others: their names, how they are started, and that nothing of them is left."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.foreign_server import ServerMissing, foreign_server, free_port
from benchmarks.peers.servers import (
    PeerServer,
    Room,
    gguf_of,
    llama_command,
    peer_server,
    vllm_command,
    vllm_environment,
)

ROOM = Room(slots=32, positions=384, threads=2)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize(
    ("option", "server"),
    [
        ("vllm=/a/python", PeerServer("vllm", "bfloat16", "/a/python")),
        ("vllm:float32=/a=b/python", PeerServer("vllm", "float32", "/a=b/python")),
        (
            "llama-server:int4=/a/llama-server",
            PeerServer("llama-server", "int4", "/a/llama-server"),
        ),
    ],
)
def test_a_server_has_a_name(option: str, server: PeerServer) -> None:
    assert PeerServer.of_option(option) == server
    assert PeerServer.of_option(server.option) == server


@pytest.mark.parametrize("option", ["", "vllm", "vllm=", "ollama=/a", "vllm:int8=/a", "vllm:=/a"])
def test_what_is_none_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"is not a server|vllm has bfloat16, float32"):
        PeerServer.of_option(option)


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


def test_4_bits_are_made_by_the_program_beside_the_server(tmp_path: Path) -> None:
    server = PeerServer("llama-server", "int4", str(tmp_path / "llama-server"))
    with pytest.raises(ServerMissing, match=r"4 bits need .*llama-quantize"):
        gguf_of(server, tmp_path, ROOM)
    quantize = tmp_path / "llama-quantize"
    quantize.write_text('#!/bin/sh\necho "$1 $3 $4" > "$2"\n')
    quantize.chmod(0o755)
    made = gguf_of(server, tmp_path, ROOM)
    assert made.read_text().split() == [str(tmp_path / "float32.gguf"), "q4_0", "2"]


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    server = PeerServer("llama-server", "int8", str(tmp_path / "nobody"))
    with (
        pytest.raises(ServerMissing, match="nobody does not run"),
        peer_server(server, tmp_path, ROOM),
    ):
        raise AssertionError("the block is not entered")


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
