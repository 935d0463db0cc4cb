"""On Ray: shards computed on many machines by Ray Data, in the order and the bytes of one process.

The command reads, encodes and plans; workers hold the model (`ray_worker.py`). A few shards per
worker are planned ahead of the one that is written next, so memory grows neither with the text nor
where one worker is slower than the others. A worker that dies is started anew by Ray, and what it
was computing is computed again, to the same bits. Covers starting Ray on this machine or joining a
cluster, and how many workers of how many threads fit there. Ray is an optional dependency, imported
in functions alone. Does not plan and does not write.
"""

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.device import available_processors
from logitd.model.extraction.compute import Counted, Group, Placing
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.pluralize import pluralize
from logitd.model.extraction.ray_worker import GREETING, Feed, ShardWorker, Task, tickets
from logitd.model.extraction.wanted import Wanted
from logitd.model.extras import installation
from logitd.model.version import VERSION

LOCAL = "local"
AHEAD = 3
"""Shards per worker that are planned and not yet written: one that is computed, one that waits for
it, and one that is done before its turn."""
DEATHS = 3
"""Of workers one after the other while they load the model, until that is to blame."""
CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Which machines compute.

    address  of a Ray cluster (host:port), "auto" for the one that this machine belongs to, or
             "local": Ray is started here, and ended with the command
    workers  processes that hold the model; None: as many as fit
    """

    address: str
    workers: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """What a machine gives to Ray."""

    processors: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Workers:
    """How many, and what each takes. `fit` of them have room now."""

    count: int
    device: str  # cpu or cuda
    threads: int
    fit: int


def require_ray() -> None:
    """Import Ray Data with settings that it reads once. Raises ExtractionError where it is not
    installed."""
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # what is left at the end would start Ray anew
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        raise ExtractionError(
            "--ray computes on the machines of a Ray cluster, which needs Ray Data, and that is "
            f"not installed: {installation('ray')}"
        ) from error


def choose_workers(nodes: Sequence[Node], device: str, threads: int, count: int | None) -> Workers:
    """Workers of equally many threads. Without `threads` each takes what a machine has, shared by
    its GPUs, or by as many as `count` puts there. Raises ExtractionError where none fits."""
    if device not in ("auto", "cpu", "cuda"):
        raise ExtractionError(
            f"--device {device} names one device, and with --ray each worker gets its own: give "
            "cpu, cuda or auto"
        )
    on_gpu = device == "cuda" or (device == "auto" and any(node.gpus for node in nodes))
    usable = [node for node in nodes if node.processors and (node.gpus or not on_gpu)]
    if not usable:
        raise ExtractionError(
            f"no machine of the cluster has {'a GPU' if on_gpu else 'processors'} for a worker: "
            f"{_told(nodes)}"
        )
    if not threads:
        each = 1 if count is None else -(-count // len(usable))
        sharing = [min(node.gpus, each) if count and on_gpu else node.gpus for node in usable]
        threads = max(
            1,
            min(
                node.processors // (gpus if on_gpu else each)
                for node, gpus in zip(usable, sharing, strict=True)
            ),
        )
    rooms = [node.processors // threads for node in usable]
    if on_gpu:
        rooms = [min(room, node.gpus) for room, node in zip(rooms, usable, strict=True)]
    if not (fit := sum(rooms)):
        raise ExtractionError(
            f"a worker of {pluralize(threads, 'thread')} fits no machine of the cluster: "
            f"{_told(nodes)}. Give --threads {max(node.processors for node in usable)} or fewer"
        )
    return Workers(count or fit, "cuda" if on_gpu else "cpu", threads, fit)


def _told(nodes: Sequence[Node]) -> str:
    """The machines of the cluster, for an error."""
    resources = [
        f"{pluralize(node.processors, 'processor')} and {pluralize(node.gpus, 'GPU')}"
        for node in nodes
    ]
    return f"Ray has {pluralize(len(nodes), 'machine')} with {'; '.join(dict.fromkeys(resources))}"


def open_on_ray(
    checkpoint: CheckpointInfo,
    wanted: Wanted,
    placing: Placing,
    cluster: Cluster,
    log: Callable[[str], None],
) -> "RayComputer":
    """Workers that hold the checkpoint. Raises ExtractionError where there is not such a cluster,
    where nothing fits it, and where a worker cannot hold the model."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(connected(cluster, log))
        workers = choose_workers(_nodes(), placing.device, placing.threads, cluster.workers)
        text = (
            f"{pluralize(workers.count, 'worker')} on {workers.device}, "
            f"{pluralize(workers.threads, 'thread')} each"
        )
        if workers.count > workers.fit:
            if cluster.address == LOCAL:
                raise ExtractionError(
                    f"{pluralize(workers.count, 'worker')} of "
                    f"{pluralize(workers.threads, 'thread')} do not fit this machine, "
                    f"{workers.fit} do: {_told(_nodes())}"
                )
            text += f"; there is room for {workers.fit} now, the others wait for it"
        log(text)
        task = Task(
            checkpoint.path.absolute(),
            checkpoint.weights_sha256,
            wanted,
            replace(placing, device=workers.device, threads=workers.threads),
            VERSION,
        )
        feed = _start_feed()
        answers = stack.enter_context(contextlib.closing(_answers(task, workers, feed)))
        computer = RayComputer(feed, answers, AHEAD * workers.count, log)
        computer.on_close = stack.pop_all().close
    return computer


class RayComputer:
    """Workers on a cluster that this process is connected to, behind the seam of `Computer`."""

    def __init__(
        self, feed: Any, answers: Iterator[Any], ahead: int, log: Callable[[str], None]
    ) -> None:
        """`feed` is the actor, `answers` what the pipeline gives, `ahead` how many shards are
        planned and not yet written."""
        self._feed, self._answers = feed, answers
        self._ahead = ahead
        self._log = log
        self._restarts: set[tuple[str, int]] = set()
        self.on_close: Callable[[], None] = lambda: None
        self._next_ticket = GREETING
        self.computation: Mapping[str, Any] = json.loads(self._answer()["computation"])

    def shards(
        self, groups: Iterable[Group], tell: Counted = lambda tokens: None
    ) -> Iterator[tuple[Group, bytes]]:
        """Each group with its file, in order; a few per worker are asked for ahead."""
        waiting: deque[Group] = deque()
        given = self._next_ticket
        for group in groups:
            self._feed.give.remote(given, group)
            given += 1
            waiting.append(group)
            if len(waiting) >= self._ahead:
                yield self._shard(waiting.popleft(), tell)
        self._feed.end.remote()
        while waiting:
            yield self._shard(waiting.popleft(), tell)

    def close(self) -> None:
        """End the workers, and Ray where it was started for them."""
        self.on_close()

    def _shard(self, group: Group, tell: Counted) -> tuple[Group, bytes]:
        ticket = self._next_ticket
        content = self._answer()["content"]
        self._feed.forget.remote(ticket)
        tell(sum(unit.counted for unit in group))
        return group, content

    def _answer(self) -> dict[str, Any]:
        """The answer to the next ticket."""
        with _ray_errors():
            table = next(self._answers)
        (answer,) = table.to_pylist()
        if answer["ticket"] != self._next_ticket:
            raise ExtractionError(
                f"Ray gave shard {answer['ticket']} where {self._next_ticket} was next: its order "
                "was not kept, so nothing more is written"
            )
        self._next_ticket += 1
        if answer["error"]:
            raise ExtractionError(answer["error"])
        if answer["began_again"] and (key := (answer["node"], answer["process"])) not in (
            self._restarts
        ):
            self._restarts.add(key)
            self._log(f"a worker on {answer['node']} died and was started anew; nothing is lost")
        return answer


def _start_feed() -> Any:
    """Beside the command: only what ends both loses it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Feed).remote()


def _answers(task: Task, workers: Workers, feed: Any) -> Any:
    """The pipeline: tickets to workers to answers, in order, as tables of one row. A generator,
    which ends the workers when it is closed."""
    import ray.data

    # Everything comes of one item, so that one stream gives the tickets out as they are asked for.
    dataset = ray.data.from_items([GREETING], override_num_blocks=1)
    context = dataset.context
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1  # bytes: whatever comes is a block, and passed on at once
    context.execution_no_progress_timeout_s = -1  # a large shard may take an hour
    context.max_consecutive_actor_init_deaths = DEATHS
    context.enable_progress_bars = False
    answers = dataset.map_batches(
        tickets, batch_size=None, fn_kwargs={"feed": feed}, num_cpus=0
    ).map_batches(
        ShardWorker,
        batch_size=None,
        batch_format="numpy",
        fn_constructor_kwargs={"task": task, "feed": feed},
        compute=ray.data.ActorPoolStrategy(size=workers.count),
        num_cpus=workers.threads,
        num_gpus=1 if workers.device == "cuda" else 0,
    )
    return iter(answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))


@contextlib.contextmanager
def _ray_errors() -> Iterator[None]:
    """Say in a sentence what Ray raises: workers answer what a user can mend themselves."""
    import ray

    try:
        yield
    except ray.exceptions.RayError as error:
        raise ExtractionError(f"Ray cannot go on: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The innermost cause of what Ray raised, in a line."""
    import ray

    while isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        error = error.cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _nodes() -> list[Node]:
    """The machines of the cluster that this process is connected to."""
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in resources]


@contextlib.contextmanager
def connected(cluster: Cluster, log: Callable[[str], None]) -> Iterator[None]:
    """Be a driver of the cluster: Ray is started here for `local`, and ended with the block. Raises
    ExtractionError."""
    import ray

    local = cluster.address == LOCAL
    connecting = _started_here(log) if local else joined(cluster.address)

    with connecting:
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _started_here(log: Callable[[str], None]) -> Iterator[None]:
    """Ray on this machine, with files of its own that are removed at the end. Ray listens on every
    interface, whatever address it is told; who has not the token is turned away."""
    log("starting Ray on this machine")
    # Ray would else write a token into the home of whoever runs this. It stays set: what Ray read
    # of it once it keeps for the process.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Sockets have names of at most 107 bytes: no deeper folder.
    folder = tempfile.mkdtemp(prefix="logitd-ray-", dir="/tmp" if Path("/tmp").is_dir() else None)
    try:
        with _driving(
            address=LOCAL,
            include_dashboard=False,
            num_cpus=available_processors(),
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        ):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Be a driver of the cluster at an address. Raises ExtractionError where there is none."""
    if "://" in address:
        raise ExtractionError(
            f"--ray {address}: Ray Data does not work through Ray's client. Run the command on a "
            "machine of the cluster with --ray auto"
        )
    host, colon, port = address.rpartition(":")
    if address != "auto":
        if not colon or not host or not port.isdecimal():
            raise ExtractionError(
                f"--ray {address} is not an address: give host:port (that of `ray start --head`, "
                "port 6379 unless another was chosen), auto or local"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ExtractionError(
                f"--ray {address}: nothing answers there ({error}). Is it the address of `ray "
                "start --head`, and is that running?"
            ) from error
    with _driving(address=address):
        yield


@contextlib.contextmanager
def _driving(**arguments: Any) -> Iterator[None]:
    """ray.init, quietly, and its end."""
    import ray
    import ray.data

    # Ray prints deaths of workers on stdout, where the result goes, and has no switch for it.
    ray._private.worker._worker_logs_enabled = False
    try:
        with _without_stderr():
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **arguments)
    except (ConnectionError, OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        cause = error.__cause__ or error
        if "InvalidAuthToken" in str(cause):
            raise ExtractionError(
                f"--ray {arguments['address']}: the cluster asks for a token, and this one is "
                "missing or another: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to that of the "
                "cluster"
            ) from error
        raise ExtractionError(
            f"--ray {arguments['address']}: Ray cannot be reached or started ({_reason(cause)})"
        ) from error
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """What Ray's native code says while it starts goes nowhere; failures come as exceptions."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
