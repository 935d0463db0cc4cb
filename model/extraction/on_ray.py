"""On Ray: computes the shards on the workers of a Ray cluster. The files have the same bytes as if
one process had computed them.

The command itself reads and encodes the text, plans the shards and writes them. Each worker is a
Ray actor with a copy of the model. Ray places the workers, restarts those that die and repeats
their calls. Only a few shards per worker are planned ahead, so memory does not grow with the text.
Ray is an optional dependency, imported only inside functions; `ray_cluster.py` joins the cluster.
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
"""Number of shards per worker that are planned and not yet written: one being computed, one that
follows, and one that is finished and waits for an earlier shard."""
ATTEMPTS = 3
"""Number of workers that may die while computing the same shard before the command ends."""


def choose_workers(
    nodes: Sequence[Mapping[str, float]], options: ComputeOptions, count: int | None
) -> tuple[int, int, ComputeOptions]:
    """Choose the number of workers. Returns that number, the number of workers that fit into the
    cluster now, and the options of each worker. `nodes` are the resources of each machine, under
    Ray's names. Raises ExtractionError if no worker fits."""
    if options.device not in ("auto", "cpu", "cuda"):
        raise ExtractionError(f"--device is {options.device}; with --ray set cpu, cuda or auto")
    any_gpu = any(node.get("GPU") for node in nodes)
    on_gpu = options.device == "cuda" or (options.device == "auto" and any_gpu)
    # Each machine's processors, and its maximum number of workers: one per GPU, or per processor.
    machines = [
        (int(node["CPU"]), int(node["GPU" if on_gpu else "CPU"]))
        for node in nodes
        if node.get("CPU") and (node.get("GPU") or not on_gpu)
    ]
    threads = options.threads or _threads_that_fill(machines, count, on_gpu=on_gpu)
    fit = sum(min(processors // threads, most) for processors, most in machines)
    if not fit:
        needs = f"--threads {threads}{' and a GPU' if on_gpu else ''}"
        raise ExtractionError(
            f"no machine has room for a worker with {needs}; the resources are {list(nodes)}"
        )
    return count or fit, fit, replace(options, device="cuda" if on_gpu else "cpu", threads=threads)


def _threads_that_fill(
    machines: Sequence[tuple[int, int]], count: int | None, *, on_gpu: bool
) -> int:
    """Choose the number of threads per worker so that the workers of the smallest machine use all
    its processors. `count` workers are spread evenly over the machines; if it is None, a machine
    has one worker per GPU, or a single worker on CPUs."""
    if count is not None:
        each = -(-count // max(1, len(machines)))
    else:
        each = max((most for _, most in machines), default=1) if on_gpu else 1
    shares = (processors // min(most, each) for processors, most in machines)
    return max(1, min(shares, default=1))


class ShardWorker:
    """A Ray actor with the model, which the first call loads."""

    def __init__(self, path: Path, quantity: Quantity, options: ComputeOptions) -> None:
        import ray

        self._arguments = path, quantity, options
        self._computer: ShardComputer | None = None
        self._machine = ray.util.get_node_ip_address()
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed

    def facts(self) -> dict[str, Any]:
        """Load the model. Returns everything that affects the results. Raises ExtractionError."""
        try:
            checkpoint = read_checkpoint(self._arguments[0])
            self._computer = open_computer(*self._arguments, lambda line: None)
        except (CheckpointError, DeviceError, KernelError) as error:
            raise ExtractionError(f"on {self._machine}: {error}") from error
        computation = self._computer.computation
        processor = describe(choose_device(computation["device"]))
        return {"computation": computation, "processor": processor, **_identity(checkpoint)}

    def shard(self, group: Group, expected: Mapping[str, Any]) -> tuple[bytes, str]:
        """The content of a shard's file, and the name of this machine if this is the first call
        after a restart of the worker, else "". Raises ExtractionError if the worker's facts differ
        from `expected`."""
        restarted = self._restarted and self._computer is None
        if self._computer is None:
            _require_equal(expected, self.facts())
        assert self._computer is not None
        return self._computer.shard(group), self._machine if restarted else ""


def _identity(checkpoint: CheckpointInfo) -> dict[str, str]:
    """The version, the weights and the model, which determine the values on every machine."""
    weights, model = checkpoint.weights_sha256, checkpoint.model_sha256
    return {"logitd": VERSION, "weights": weights, "model": model}


def _require_equal(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    if different := list(differences(expected, found)):
        raise ExtractionError(
            f"the results of a worker would differ: {'; '.join(different)}. Install the same "
            "logitd and checkpoint on every machine, set --dtype, --kernels, --kernel-target and "
            "--threads, or remove machines of another kind from the cluster"
        )


@dataclass(frozen=True)
class RayComputer:
    """ShardWorkers on a cluster, all with the same `facts`; used like a ShardComputer."""

    workers: Sequence[Any]
    facts: Mapping[str, Any]
    log: Callable[[str], None]

    @property
    def computation(self) -> Mapping[str, Any]:
        return self.facts["computation"]

    def shards(self, groups: Iterable[Group], tell: Counted) -> Iterator[tuple[Group, bytes]]:
        """Yield each group with the content of its file, in order. The groups are assigned to the
        workers in turn, AHEAD groups per worker."""
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
    import ray

    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raise ExtractionError(str(error.cause)) from error
    except ray.exceptions.RayError as error:
        raise ExtractionError(
            f"{ATTEMPTS} workers died one after another at {where} ({type(error).__name__}). If "
            "they ran out of memory, choose a smaller --shard-tokens and another --out, or use "
            "machines with more memory"
        ) from error


@contextlib.contextmanager
def on_ray(
    checkpoint: CheckpointInfo,
    quantity: Quantity,
    options: ComputeOptions,
    address: str,
    workers: int | None,
    log: Callable[[str], None],
) -> Iterator[RayComputer]:
    """Start workers that load the checkpoint and run until the end of the block. If `workers` is
    None, as many as fit are started. Raises ExtractionError if the cluster at `address`
    (`ray_cluster.connected`) cannot be joined, if no worker fits, or if a worker cannot load the
    model."""
    import ray

    with connected(address, log):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        count, fit, placed = choose_workers(nodes, options, workers)
        sizes = f"{count} on {placed.device} with --threads {placed.threads}"
        if count > fit and address == LOCAL:
            raise ExtractionError(
                f"--ray-workers is {count}, but only {fit} workers on {placed.device} with "
                f"--threads {placed.threads} fit on this machine"
            )
        log(f"workers: {sizes}; {fit} of them fit now")
        actor = ray.remote(
            num_cpus=placed.threads,
            num_gpus=1 if placed.device == "cuda" else 0,
            max_restarts=-1,
            max_task_retries=ATTEMPTS - 1,
            runtime_env={"env_vars": spin_variables(os.environ)},
        )(ShardWorker)
        arguments = checkpoint.path.absolute(), quantity, placed
        actors = [actor.remote(*arguments) for _ in range(count)]
        facts = _get(actors[0].facts.remote(), "the model")
        ours = _identity(checkpoint)
        _require_equal(ours, {name: facts[name] for name in ours})
        yield RayComputer(actors, facts, log)
