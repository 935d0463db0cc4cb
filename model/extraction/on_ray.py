"""On Ray: shards computed by workers of a Ray cluster, in the order and bytes of one process.

The command reads, encodes, plans and writes; each worker is a Ray actor that holds the model. Ray
places the workers, restarts those that die and repeats their calls. A few shards per worker are
planned ahead, so memory does not grow with the text. Ray is an optional dependency, imported inside
functions only. Joins no cluster (`ray_cluster.py`).
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointError, CheckpointInfo, read_checkpoint
from logitd.model.device import DeviceError, choose_device, describe
from logitd.model.extraction.compute import Counted, Group, ShardComputer, open_computer
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.index import differences
from logitd.model.extraction.quantities import Quantity
from logitd.model.extraction.ray_cluster import LOCAL, connected
from logitd.model.inference.kernels.select import KernelError
from logitd.model.inference.options import ComputeOptions
from logitd.model.openmp import spin_variables
from logitd.model.version import VERSION

AHEAD = 3
"""Shards per worker that are planned and not yet written: computed now, next, or before turn."""
ATTEMPTS = 3
"""Workers that may die over the same shard before it is to blame."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster (`ray_cluster.connected`) and the number of its workers; None: all that fit."""

    address: str
    workers: int | None = None


def choose_workers(
    nodes: Sequence[Mapping[str, float]], options: ComputeOptions, count: int | None
) -> tuple[int, int, ComputeOptions]:
    """The number of workers, how many of them have room now, and how each computes.

    Default threads: those of the smallest machine, shared by its GPUs or by its part of `count`.
    `nodes` are the machines' resources by Ray's names. Raises ExtractionError if none fits."""
    device, threads = options.device, options.threads
    if device not in ("auto", "cpu", "cuda"):
        raise ExtractionError(f"--device is {device}; with --ray give cpu, cuda or auto")
    on_gpu = device == "cuda" or (device == "auto" and any(node.get("GPU") for node in nodes))
    # Processors of each machine, and how many workers it can hold at most.
    unit = "GPU" if on_gpu else "CPU"
    rooms = [(int(n["CPU"]), int(n[unit])) for n in nodes if n.get("CPU") and n.get(unit)]
    if not threads and rooms:
        each = -(-count // len(rooms)) if count else max(m for _, m in rooms) if on_gpu else 1
        threads = max(1, min(processors // min(most, each) for processors, most in rooms))
    fit = sum(min(processors // threads, most) for processors, most in rooms)
    if not fit:
        needs = f"--threads {threads}{' and a GPU' if on_gpu else ''}"
        raise ExtractionError(f"no machine has room for a worker with {needs}; Ray has {rooms}")
    placed = replace(options, device="cuda" if on_gpu else "cpu", threads=threads)
    return count or fit, fit, placed


class ShardWorker:
    """A Ray actor with the model, which is loaded at the first call."""

    def __init__(self, path: Path, quantity: Quantity, options: ComputeOptions) -> None:
        import ray

        self._arguments = path, quantity, options
        self._computer: ShardComputer | None = None
        self._machine = ray.util.get_node_ip_address()
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed

    def facts(self) -> dict[str, Any]:
        """Load the model; everything that the bits of a shard depend on. Raises ExtractionError."""
        try:
            weights = read_checkpoint(self._arguments[0]).weights_sha256
            self._computer = open_computer(*self._arguments, lambda line: None)
        except (CheckpointError, DeviceError, KernelError) as error:
            raise ExtractionError(f"on {self._machine}: {error}") from error
        computation = self._computer.computation
        processor = describe(choose_device(computation["device"]))
        facts = {"processor": processor, "logitd": VERSION, "weights": weights}
        return {"computation": computation, **facts}

    def shard(self, group: Group, expected: Mapping[str, Any]) -> tuple[bytes, str]:
        """The file of a shard, and the machine of this worker if it has just been restarted, else
        "". Raises ExtractionError if its facts are not as `expected`."""
        restarted = self._restarted and self._computer is None
        if self._computer is None:
            _require_equal(expected, self.facts())
        assert self._computer is not None
        return self._computer.shard(group), self._machine if restarted else ""


def _require_equal(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise ExtractionError if a worker has other facts than expected."""
    if different := list(differences(expected, found)):
        raise ExtractionError(
            f"a worker would compute other bits: {'; '.join(different)}. Give the same logitd and "
            "checkpoint to every machine, set --dtype, --kernels, --kernel-target and --threads, "
            "or leave machines of another kind out of the cluster"
        )


@dataclass(frozen=True)
class RayComputer:
    """ShardWorkers on a cluster, all with the same `facts` (`Computer`)."""

    workers: Sequence[Any]
    facts: Mapping[str, Any]
    log: Callable[[str], None]

    @property
    def computation(self) -> Mapping[str, Any]:
        return self.facts["computation"]

    def shards(
        self, groups: Iterable[Group], tell: Counted = lambda tokens: None
    ) -> Iterator[tuple[Group, bytes]]:
        """Each group with its file, in order; AHEAD groups per worker are asked for ahead."""
        calls = (
            (group, worker.shard.remote(group, self.facts))
            for group, worker in zip(groups, cycle(self.workers), strict=False)
        )
        waiting = deque(islice(calls, AHEAD * len(self.workers)))
        while waiting:
            group, call = waiting.popleft()
            content, restarted = _get(call, f"token {group[0].start} of {group[0].source}")
            if restarted:
                self.log(f"a worker on {restarted} died and was restarted; nothing is lost")
            tell(sum(unit.counted for unit in group))
            yield group, content
            waiting.extend(islice(calls, 1))


def _get(call: Any, where: str) -> Any:
    """The result of a worker's call. Raises ExtractionError, with the worker's own sentence."""
    import ray

    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raise ExtractionError(str(error.cause)) from error
    except ray.exceptions.RayError as error:
        raise ExtractionError(
            f"{ATTEMPTS} workers died one after the other over {where} ({type(error).__name__}). "
            "If memory was too small, give a smaller --shard-tokens with another --out, or "
            "machines with more memory"
        ) from error


@contextlib.contextmanager
def on_ray(
    checkpoint: CheckpointInfo,
    quantity: Quantity,
    options: ComputeOptions,
    cluster: Cluster,
    log: Callable[[str], None],
) -> Iterator[RayComputer]:
    """Workers with the checkpoint, which end with the block. Raises ExtractionError if there is no
    such cluster, if no worker fits it, and if a worker cannot hold the model."""
    import ray

    with connected(cluster.address, log):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        count, fit, placed = choose_workers(nodes, options, cluster.workers)
        sizes = f"{count} on {placed.device} with --threads {placed.threads}"
        if count > fit and cluster.address == LOCAL:
            raise ExtractionError(f"--ray-workers: {sizes}; only {fit} of them fit")
        log(f"workers: {sizes}; {fit} of them fit now")
        actor = ray.remote(
            num_cpus=placed.threads,
            num_gpus=1 if placed.device == "cuda" else 0,
            max_restarts=-1,
            max_task_retries=ATTEMPTS - 1,
            runtime_env={"env_vars": spin_variables(os.environ)},
        )(ShardWorker)
        arguments = checkpoint.path.absolute(), quantity, placed
        workers = [actor.remote(*arguments) for _ in range(count)]
        facts = _get(workers[0].facts.remote(), "the model")
        ours = {"logitd": VERSION, "weights": checkpoint.weights_sha256}
        _require_equal(ours, {name: facts[name] for name in ours})
        yield RayComputer(workers, facts, log)
