"""Starts vLLM and llama-server with the models that `models.py` writes.

A server is specified as `vllm:bfloat16=PYTHON` or `llama-server:int8=BINARY`, for example. Both get
as many slots as there are clients, as many threads as logitd, and otherwise their own defaults. In
addition, llama-server gets flash attention, and a cache just large enough for all streams.

vLLM computes on a CPU in float32 and bfloat16; 8 and 4 bits would need weights quantized by other
programs, and are not measured. It gets 4 GiB for keys and values.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.peers.foreign_server import ServerMissing, foreign_server, free_port
from benchmarks.peers.weights import HUGGINGFACE

VLLM, LLAMA_SERVER = "vllm", "llama-server"
DTYPES = {
    VLLM: ("bfloat16", "float32"),
    LLAMA_SERVER: ("bfloat16", "float32", "int8", "int4"),
}
"""Dtypes of each server; the first is the default."""
VLLM_CACHE_GIB = 4
CACHE_ROUNDING = 256
"""llama.cpp rounds each sequence's cache up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A server to start. `program` is the Python interpreter that has vLLM, or the llama-server
    binary."""

    kind: str
    dtype: str
    program: str

    @classmethod
    def of_option(cls, option: str) -> Self:
        """Parse `KIND[:DTYPE]=PROGRAM`. Raises ValueError."""
        name, _, program = option.partition("=")
        kind, colon, dtype = name.partition(":")
        if kind not in DTYPES or not program:
            raise ValueError(
                f"{option!r} names no server: write {' or '.join(DTYPES)}, then =PROGRAM"
            )
        dtype = dtype if colon else DTYPES[kind][0]
        if dtype not in DTYPES[kind]:
            raise ValueError(f"{kind} is measured in {', '.join(DTYPES[kind])}, not in {dtype!r}")
        return cls(kind, dtype, program)

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.dtype}"

    @property
    def option(self) -> str:
        """The option that `of_option` parses into this server."""
        return f"{self.kind}:{self.dtype}={self.program}"

    @property
    def gguf(self) -> str | None:
        """The dtype of the GGUF file that the server reads, or from which that file is made. None
        if the server reads another format."""
        if self.kind != LLAMA_SERVER:
            return None
        return "float32" if self.dtype == "int4" else self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The capacity that a server must provide: concurrent streams, positions of each, threads."""

    slots: int
    positions: int
    threads: int


@contextmanager
def peer_server(peer: PeerServer, models: Path, room: Room) -> Iterator[str]:
    """Yield the server's URL once it is ready; `models` is the folder written by `models.py`.
    Raises ServerMissing."""
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if key not in OURS}
    if peer.kind == VLLM:
        command = vllm_command(peer, models, room, port)
        environment |= vllm_environment(room)
    else:
        command = llama_command(peer, gguf_of(peer, models, room), room, port)
    log = models / f"{peer.kind}-{peer.dtype}.log"
    with foreign_server(command, port=port, log=log, environment=environment) as url:
        yield url


OURS = {"OMP_NUM_THREADS", "PYTHONPATH"}
"""Environment variables that this process may need but that other projects' servers should not
get."""


def vllm_command(peer: PeerServer, models: Path, room: Room, port: int) -> list[str]:
    return [
        peer.program, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(models / HUGGINGFACE), "--dtype", peer.dtype,
        "--max-model-len", str(room.positions), "--max-num-seqs", str(room.slots),
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def vllm_environment(room: Room) -> dict[str, str]:
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{room.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_CACHE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
    }


def llama_command(peer: PeerServer, gguf: Path, room: Room, port: int) -> list[str]:
    each = -(-room.positions // CACHE_ROUNDING) * CACHE_ROUNDING
    return [
        peer.program, "-m", str(gguf), "-np", str(room.slots), "-c", str(room.slots * each),
        "-fa", "on", "-t", str(room.threads), "-tb", str(room.threads),
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def gguf_of(peer: PeerServer, models: Path, room: Room) -> Path:
    """Path of the GGUF file that the server reads. If the 4-bit file does not exist
    yet, the `llama-quantize` in the server's folder makes it. Raises ServerMissing."""
    whole = models / f"{peer.gguf}.gguf"
    if peer.dtype != "int4":
        return whole
    quantized, quantize = models / "int4.gguf", Path(peer.program).with_name("llama-quantize")
    if not quantized.exists():
        command = [str(quantize), str(whole), str(quantized), "q4_0", str(room.threads)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ServerMissing(f"4 bits need {quantize}: {error}") from error
    return quantized
