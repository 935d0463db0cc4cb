"""Measures speed and size with the main benchmarks, and prints for each target whether it is met.
benchmarks/README.md lists all benchmarks.

    python -m benchmarks.goals [--threads N] [--peer-python [NAME=]PYTHON ...]
                               [--peer SERVER ...] [--folder runs/goals]

Runs the commands that `--list` shows, one after the other. The output of each is stored in the
folder as NAME.txt; its last line is JSON. A command whose file exists is not run again, so the run
can be interrupted and resumed. Delete a file to measure again. A command that fails leaves
NAME.log.

llama.cpp, OpenVINO, CTranslate2 and `transformers serve` are measured if --peer-python names
interpreters that have them, and vLLM and llama-server if --peer names them
(`benchmarks.closed_loop`; benchmarks/peers/README.md). Run it on an idle machine. The last line is
JSON.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import new_parser
from benchmarks.peers.servers import PeerServer
from benchmarks.shapes import BATCHES
from benchmarks.shapes import SHAPES as SIZES
from benchmarks.synthetic import config_of, save_synthetic
from benchmarks.targets import Target, table
from logitd.model.openmp import spin_variables

ROOT = Path(__file__).parent.parent
BUNDLED = "python-small"
SHAPES = ("124m", "30m", BUNDLED)
FLAGS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--dtype", "bfloat16", "--quantize", "int8"),
    "int4": ("--dtype", "bfloat16", "--quantize", "int4"),
}
"""logitd's flags for each dtype. With int8 and int4, only the matrices are quantized; everything
else is in bfloat16."""
DTYPES = tuple(FLAGS)
CLOSED_LOOP = "124m"
"""The shape with which other servers are measured in a closed loop."""
STRONGEST = {
    "float32": {"llama.cpp", "openvino", "ctranslate2"},
    "bfloat16": {"llama.cpp", "openvino"},
    "int8": {"llama.cpp", "openvino", "ctranslate2"},
    "int4": {"llama.cpp", "openvino"},
}
"""The strongest peers for each dtype. logitd is compared with the best peer only if all of these
were measured."""
OVER_HTTP = "bfloat16"
"""The dtype in which `logitd serve` is also measured, over HTTP."""

DECODE_OVER_OTHERS = {
    ("124m", "bfloat16", 8): 1.7,
    ("124m", "bfloat16", 32): 1.5,
    ("124m", "int8", 8): 3.0,
    ("124m", "int8", 32): 3.0,
    ("30m", "bfloat16", 8): 2.0,
    ("30m", "bfloat16", 32): 2.0,
}
"""Required ratio of logitd's decode rate to the best peer's, by shape, dtype and batch size; 1 for
all other cases."""


# Commands


def commands(
    folder: Path, threads: int, pythons: Sequence[str], servers: Sequence[PeerServer]
) -> dict[str, list[str]]:
    """Each command, keyed by the name of its result. `pythons` are the values of --peer-python."""
    batches = [str(batch) for batch in BATCHES]
    common = ["--threads", str(threads)]
    commands: dict[str, list[str]] = {}
    for shape in SHAPES:
        checkpoint = ["--checkpoint", str(checkpoint_of(shape, folder))]
        for dtype in DTYPES:
            bench = [*checkpoint, *common, "--batches", "1,8,32", *FLAGS[dtype]]
            program = module("benchmarks.over_http" if dtype == OVER_HTTP else "logitd")
            commands[f"bench-{shape}-{dtype}"] = [*program, "bench", *bench]
        where = checkpoint[1] if shape == BUNDLED else shape
        commands[f"determinism-{shape}"] = [
            *module("benchmarks.determinism"), "--shape", where, "--dtype", "bfloat16", *common,
        ]  # fmt: skip
        commands[f"footprint-{shape}"] = [*module("benchmarks.footprint"), *checkpoint, *common]
        if pythons and shape != BUNDLED:
            named = [part for python in pythons for part in ("--peer-python", python)]
            peers = ["--shape", shape, *named, *common, "--batches", *batches]
            commands[f"peers-{shape}"] = [
                *module("benchmarks.peers"), *peers,
                "--peers", "logitd", "torch", "transformers", "llama.cpp", "openvino",
                "ctranslate2",
            ]  # fmt: skip
            commands[f"serving-{shape}"] = [
                *module("benchmarks.peers.serving"), *peers, "--dtypes", OVER_HTTP,
            ]  # fmt: skip
    if servers:
        targets = [f"--serve={shlex.join(FLAGS[d])}" for d in dtypes_of(servers)]
        commands["closed_loop"] = [
            *module("benchmarks.closed_loop"), "--shape", CLOSED_LOOP, *common, *targets,
            *(part for server in servers for part in ("--peer", server.option)),
            "--clients", *batches, "--seconds", "40", "--json",
        ]  # fmt: skip
    bundled = ["--checkpoint", str(checkpoint_of(BUNDLED, folder))]
    commands["profile"] = [
        *module("benchmarks.profile"), *bundled, *common, "--batches", "1", "32",
    ]  # fmt: skip
    # Other tables of benchmarks/README.md.
    for name in ("engine_step", "speculation", "constraints", "large_reply"):
        commands[name] = [*module(f"benchmarks.{name}"), *common]
    commands["constraints-bfloat16"] = [*commands["constraints"], "--dtype", "bfloat16"]
    commands["busy_neighbor"] = module("benchmarks.busy_neighbor")
    return commands


def dtypes_of(servers: Sequence[PeerServer]) -> list[str]:
    """Dtypes in which other servers are measured, without repeats."""
    return [dtype for dtype in DTYPES if any(server.dtype == dtype for server in servers)]


def module(name: str) -> list[str]:
    return [sys.executable, "-m", name]


def checkpoint_of(shape: str, folder: Path) -> Path:
    bundled = shape == BUNDLED
    return ROOT / "checkpoints" / BUNDLED if bundled else folder / "checkpoints" / shape


def make_checkpoints(folder: Path) -> None:
    """Write random weights of the shapes that are not bundled, unless they exist."""
    for shape in SHAPES:
        path = checkpoint_of(shape, folder)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            save_synthetic(path, config_of(SIZES[shape]))


def measure(name: str, command: list[str], folder: Path) -> None:
    """Run a command unless its result exists. A result is written completely or not at all."""
    log = folder / f"{name}.log"
    if log.with_suffix(".txt").exists():
        print(f"{name}: already measured", flush=True)
        return
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **spin_variables(os.environ)},  # set by `logitd` for itself
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
    if done.returncode != 0 or last_line(log) is None:
        print(f"{name}: exit code {done.returncode}, no result; see {log}", flush=True)
        return
    log.replace(log.with_suffix(".txt"))


def last_line(path: Path) -> Any:
    """Return the last line of a command's output as JSON; None if there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return None


# Targets


def targets(
    results: Mapping[str, Any], *, with_peers: bool, servers: Sequence[PeerServer] = ()
) -> Iterator[Target]:
    """The targets, each with its figure. `results` holds the JSON of each command, or None."""
    for shape in SHAPES:
        for dtype in DTYPES:
            bench = results.get(f"bench-{shape}-{dtype}")
            share = figure(bench, "engine.decode", "share_of_limit", batch=1)
            yield Target(f"{shape}, {dtype}: decode of 1, of the limit", share, 0.85, "share")
            if dtype == OVER_HTTP:
                share = figure(bench, "http", "share_of_engine", batch=32)
                name = f"{shape}, {dtype}: over HTTP, 32 streams, of the engine"
                yield Target(name, share, 0.95, "share")
    for batch, bound in ((1, 150.0), (32, 400.0)):
        cost = figure(results.get("profile"), "profiles", "overhead_us", case="decode", batch=batch)
        name = f"{BUNDLED}: a step of {batch}, outside the model and the sampling"
        yield Target(name, cost, bound, "us", at_least=False)
    for shape in SHAPES:
        result = results.get(f"determinism-{shape}")
        cost = result["native"]["whole_share"] if result and result["native"] else None
        yield Target(f"{shape}: cost of determinism for a step of 1", cost, 0.1, "share", False)
        result = results.get(f"footprint-{shape}")
        ready = result["ready_seconds"] if result else None
        yield Target(f"{shape}: server ready", ready, 3.0, "s", at_least=False)
        besides = result["besides_bytes"] / 1e6 if result else None
        name = f"{shape}: memory other than weights and KV cache"
        yield Target(name, besides, 500.0, "MB", at_least=False)
        if with_peers and shape != BUNDLED:
            yield from peer_targets(results, shape)
    yield from closed_loop_targets(results.get("closed_loop"), servers)


def peer_targets(results: Mapping[str, Any], shape: str) -> Iterator[Target]:
    """Compare logitd with its peers in each dtype: decode at each batch size, one prompt, then
    streams over HTTP."""
    peers, serving = results.get(f"peers-{shape}"), results.get(f"serving-{shape}")
    for dtype in DTYPES:
        for kind, batch in (*(("decode", batch) for batch in BATCHES), ("prefill", 1)):
            rates = rates_of(peers, "peer", f"{kind}_tokens_per_second", dtype=dtype, batch=batch)
            ratio = over_best(rates, "logitd") if rates.keys() >= STRONGEST[dtype] else None
            bound = DECODE_OVER_OTHERS.get((shape, dtype, batch), 1.0)
            name = f"{shape}, {dtype}: {kind} of {batch}, over the best other"
            yield Target(name, ratio, bound if kind == "decode" else 1.15, "ratio")
    for batch in BATCHES:
        rates = rates_of(serving, "server", "tokens_per_second", batch=batch)
        name = f"{shape}, {OVER_HTTP}: {batch} streams over HTTP, over the best transformers serve"
        yield Target(name, over_best(rates, "logitd serve"), 1.0, "ratio")


def closed_loop_targets(result: Any, servers: Sequence[PeerServer]) -> Iterator[Target]:
    """Compare tokens per second with other servers, per dtype and number of clients. The ratio is
    None if any request to a server failed."""
    for dtype in dtypes_of(servers):
        ours = f"logitd serve {shlex.join(FLAGS[dtype])}"
        names = {ours, *(server.name for server in servers if server.dtype == dtype)}
        for clients in BATCHES:
            rates = rates_of(
                result, "target", "tokens_per_second", load=str(clients), failed=0
            )  # fmt: skip
            compared = {name: rate for name, rate in rates.items() if name in names}
            ratio = over_best(compared, ours) if compared.keys() == names else None
            name = f"{CLOSED_LOOP}, {dtype}: {clients} clients, over the best other server"
            yield Target(name, ratio, 1.0, "ratio")


def figure(result: Any, place: str, key: str, **where: Any) -> float | None:
    """The value of `key` in the first row at `place` ("engine.decode", for example) whose fields
    equal `where`; None if there is no such row."""
    return next((row[key] for row in rows_at(result, place, where)), None)


def rates_of(result: Any, name: str, key: str, **where: Any) -> dict[str, float]:
    """The values of the field `key`, keyed by the values of the field `name`, in the rows of the
    results whose other fields equal `where`."""
    return {row[name]: row[key] for row in rows_at(result, "results", where)}


def rows_at(result: Any, place: str, where: Mapping[str, Any]) -> list[Any]:
    for name in place.split("."):
        result = None if result is None else result[name]
    return [row for row in result or () if all(row[key] == where[key] for key in where)]


def over_best(rates: Mapping[str, float], ours: str) -> float | None:
    """Our rate over the best rate of the others; None if either is missing."""
    others = [rate for name, rate in rates.items() if name != ours]
    return rates[ours] / max(others) if ours in rates and others else None


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="[NAME=]PYTHON",
        help="interpreter that runs other engines",
    )  # fmt: skip
    parser.add_argument(
        "--peer", action="append", default=[], metavar="SERVER", type=PeerServer.of_option,
        help="a server of another project: vllm[:DTYPE]=PYTHON, llama-server[:DTYPE]=BINARY",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "goals")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these")
    parser.add_argument("--list", action="store_true", help="show the commands without running any")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    every = commands(folder, arguments.threads, arguments.peer_python, arguments.peer)
    if unknown := set(arguments.only or ()) - set(every):
        parser.error(f"no command is named {sorted(unknown)}; available are {', '.join(every)}")
    if arguments.list:
        print("\n".join(f"{name}: {' '.join(command)}" for name, command in every.items()))
        return
    make_checkpoints(folder)
    for name in arguments.only or every:
        measure(name, every[name], folder)
    results = {name: last_line(folder / f"{name}.txt") for name in every}
    judged = list(targets(results, with_peers=bool(arguments.peer_python), servers=arguments.peer))
    print(f"\n{table(judged)}\n")
    print(
        json.dumps({"threads": arguments.threads, "targets": [target.json() for target in judged]})
    )


if __name__ == "__main__":
    main()
