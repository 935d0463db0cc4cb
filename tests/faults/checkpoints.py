"""Checkpoints: files that are not files, sizes that are not true, and signals while they load.

A server is started on each. Whatever a checkpoint holds, the server is ready, or ends with exit
code 1 and a sentence that names the file, within seconds and without much memory.
"""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from logitd.model.checkpoint.checkpoint import CARD, CONFIG, RANKS, WEIGHTS
from tests.e2e.server import ServedProcess
from tests.faults.attack import Attack, Ground

SECONDS, MIB = 30.0, 1200
"""Within which a start has to end, most of them for importing torch, and the most it may take."""

HUGE: tuple[Any, ...] = (
    *(10**9, 2**40, 2**62, 10**400, -1, 0, 1e308, "many", None, True, [], {"a": 1}),
)
FIELDS = (
    ("model", "context_length"), ("model", "n_layer"), ("model", "vocab_size"),
    ("model", "padded_vocab_size"), ("model", "d_ff"), ("model", "d_model"), ("model", "head_dim"),
    ("model", "n_head"), ("model", "n_kv_head"), ("model", "rope_theta"), ("model", "norm_eps"),
    ("tokenizer", "vocab_size"), ("tokenizer", "special_tokens"), ("tokenizer", "pattern"),
    ("tokenizer", "kind"), ("training", "step"), ("training", "tokens"), ("training", "val_loss"),
    ("training", "data"), ("training", "created"), ("files", WEIGHTS), ("files", RANKS),
)  # fmt: skip


def start(path: Path) -> tuple[int | None, float, str]:
    """The exit code of a server on a checkpoint, None if it is ready; the most memory in MiB that
    was seen, and what it said."""
    with closing(
        ServedProcess("--checkpoint", str(path), "--threads", "1", "--slots", "2", cold=True)
    ) as server:
        began, largest = time.monotonic(), 0.0
        while time.monotonic() - began < SECONDS:
            code = server.process.poll()
            if code is None:
                largest = max(largest, _resident(server.process.pid))
            if code is None and "try it:" in server.output:
                ask(server)
                return code, largest, server.output
            if code is not None:
                return code, largest, server.output
            time.sleep(0.02)
        raise AssertionError(f"neither ready nor ended after {SECONDS} s:\n{server.output}")


def ask(server: ServedProcess) -> None:
    """What is served answers: what it says of itself, and a text."""
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        replies = [client.get(path) for path in ("/info", "/metrics", "/tokenizer_info")]
        replies.append(client.post("/generate", json={"prompt": "A b", "max_tokens": 2}))
    for reply in replies:
        assert reply.status_code < 500, f"{reply.status_code}: {reply.text}\n{server.output}"


def _resident(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    kib = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    return kib / 1024


def expect(path: Path, name: str, told: str | None = None) -> bool:
    """Start on a checkpoint; whether it was refused, which has to be with a sentence."""
    code, largest, output = start(path)
    assert "Traceback" not in output, f"{told or name}: {output}"
    assert largest < MIB, f"{told or name}: {largest:.0f} MiB"
    if code is None:
        return False
    assert code == 1, f"{told or name}: exit code {code}\n{output}"
    assert "cannot serve: " in output or "logitd serve: " in output, output
    assert str(path) in output or name in output, f"{told or name}: the file is not named\n{output}"
    return True


def odd_files(ground: Ground, count: int) -> str:
    """A pipe, a device, a folder, a loop or nonsense in the place of each file."""
    attempts = [(name, kind) for name in (CONFIG, WEIGHTS, RANKS, CARD) for kind in KINDS]
    generator = random.Random(0)
    refused = 0
    for number, (name, kind) in enumerate(generator.sample(attempts, min(count, len(attempts)))):
        path = Path(shutil.copytree(ground.checkpoint(), ground.folder / f"odd-{number}"))
        (path / name).unlink()
        KINDS[kind](path / name)
        here = expect(path, name, f"{kind} for {name}")
        assert here or name == CARD, f"{kind} for {name} was served"
        refused += here
    return f"{refused} refused with the file's name, the card is not read"


def _deep(path: Path) -> None:
    path.write_bytes(b"[" * 2**20)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "zeros": _zeros,
    "folder": os.mkdir,
    "loop": _loop,
    "deep": _deep,
    "sparse": _sparse,
    "random": lambda path: path.write_bytes(random.Random(0).randbytes(5000)),
    "empty": lambda path: path.touch(),
}


def untrue_sizes(ground: Ground, count: int) -> str:
    """Numbers in config.json that the weights do not bear out, one at a time and several."""
    generator = random.Random(0)
    fields = [(field, value) for field in FIELDS for value in HUGE]
    generator.shuffle(fields)
    must = [(("model", "context_length"), 10**9), (("model", "n_layer"), 10**9),
            (("model", "context_length"), 2**40)]  # fmt: skip
    refused = served = 0
    for number, ((section, name), value) in enumerate((must + fields)[:count]):
        path = Path(shutil.copytree(ground.checkpoint(), ground.folder / f"untrue-{number}"))
        document = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        document[section][name] = value
        (path / CONFIG).write_text(json.dumps(document), encoding="utf-8")
        if expect(path, CONFIG, f"{section}.{name} = {str(value)[:30]}"):
            refused += 1
        else:
            served += 1
    return f"{refused} refused, {served} served"


def signals_while_loading(ground: Ground, count: int) -> str:
    """SIGTERM at any moment of a start."""
    generator = random.Random(0)
    slowest = 0.0
    for _ in range(count):
        with closing(
            ServedProcess("--checkpoint", str(ground.checkpoint()), "--threads", "1")
        ) as server:
            server.wait_for("listening on port")
            time.sleep(generator.uniform(0, 0.5))
            began = time.monotonic()
            server.signal(signal.SIGTERM)
            assert server.exit_code() == 0, server.output
            slowest = max(slowest, time.monotonic() - began)
            assert "Traceback" not in server.output, server.output
    assert slowest < 2, f"{slowest:.1f} s"
    return f"exit code 0 each time, {slowest:.2f} s at most"


ATTACKS = (
    Attack(
        "odd files",
        f"exit code 1 and the file's name within {SECONDS:.0f} s and {MIB} MiB",
        odd_files,
        short=5,
        long=32,
    ),
    Attack("untrue sizes", "refused with a sentence, or served", untrue_sizes, short=5, long=264),
    Attack(
        "signals while loading",
        "exit code 0 within 2 s",
        signals_while_loading,
        short=3,
        long=60,
    ),
)
