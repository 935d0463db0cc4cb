"""Ray worker: what of an extraction runs in Ray's processes, on whatever machine.

`Feed` holds the shards that are planned and not yet written, beside the command; `tickets` is the
stream of their numbers, which Ray Data hands out; `ShardWorker` holds the model, takes a ticket,
fetches the units that it stands for and answers with their file. Numbers travel instead of units so
that whatever Ray computes again, after a death, can be fetched again.

What a user can mend comes back as a sentence in the answer, not as an exception: Ray would wrap it
in its own traces. Ray itself is imported where it runs (an optional dependency). Decides neither
how many workers there are nor where (`on_ray.py`).
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointError, read_checkpoint
from logitd.model.device import DeviceError, choose_device, describe
from logitd.model.extraction.compute import Group, Placing, ShardComputer, open_computer
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.index import differences
from logitd.model.extraction.wanted import Wanted
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.kernels.select import KernelError
from logitd.model.version import VERSION

GREETING = 0
"""The ticket that asks a worker how it computes; those of shards follow."""
DEATHS = 3
"""Of workers over the same shard, until that shard is to blame: Ray alone would try for ever."""
SECONDS_BETWEEN_LOOKS = 0.05
"""Of `tickets`, where the next shard is not planned yet."""


@dataclass(frozen=True, slots=True)
class Task:
    """What each worker is told.

    path            of the checkpoint, on every machine
    weights_sha256  of the weights that the command saw there
    version         of logitd where the command runs
    """

    path: Path
    weights_sha256: str
    wanted: Wanted
    placing: Placing
    version: str


class Feed:
    """The groups of tickets that are not answered yet, and how workers compute. An actor."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._begun: Counter[int] = Counter()  # how often each ticket's units were fetched
        self._given = GREETING + 1  # tickets; nothing is fetched for the first
        self._ended = False
        self._agreed: Mapping[str, Any] | None = None

    def give(self, ticket: int, group: Group) -> None:
        """Tickets come in order."""
        self._groups[ticket] = group
        self._given = ticket + 1

    def end(self) -> None:
        """No ticket is to come."""
        self._ended = True

    def has(self, ticket: int) -> bool | None:
        """Whether there is such a ticket; None where that is not known yet. True of those that were
        forgotten: Ray may count them again, and does not hand them out again."""
        if ticket < self._given:
            return True
        return False if self._ended else None

    def group(self, ticket: int) -> tuple[Group, int]:
        """The units that a ticket stands for, and how often they were fetched before."""
        self._begun[ticket] += 1
        return self._groups[ticket], self._begun[ticket] - 1

    def forget(self, ticket: int) -> None:
        """Its answer has arrived."""
        self._groups.pop(ticket, None)
        self._begun.pop(ticket, None)

    def agree(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """How the worker computes that came first; all others have to as well."""
        if self._agreed is None:
            self._agreed = facts
        return self._agreed


def tickets(batch: Any, feed: Any) -> Iterator[dict[str, list[int]]]:
    """Each ticket in a block of its own, when it is given. Ray Data hands a `batch` over, which is
    not needed."""
    import ray

    ticket = GREETING
    while True:
        match ray.get(feed.has.remote(ticket)):
            case True:
                yield {"ticket": [ticket]}
                ticket += 1
            case False:
                return
            case _:
                time.sleep(SECONDS_BETWEEN_LOOKS)


class ShardWorker:
    """Holds the model and answers tickets: a row with

    ticket, error  a sentence for the user, or nothing
    computation    JSON of what `Computer.computation` says, to the greeting
    content        the shard's file
    node, process  where; `began_again` where an earlier process of this worker died
    """

    def __init__(self, task: Task, feed: Any) -> None:
        import ray

        self._feed = feed
        address = ray.util.get_node_ip_address()
        self._node = f"{socket.gethostname()} ({address})"
        self._began_again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._computer: ShardComputer | None = None
        self._refusal = ""
        try:
            self._computer = self._opened(task)
        except (
            CheckpointError, DeviceError, ExtractionError, InvalidRequest, KernelError,
        ) as error:  # fmt: skip
            self._refusal = f"on {self._node}: {error}"

    def _opened(self, task: Task) -> ShardComputer:
        import ray

        if task.version != VERSION:
            raise ExtractionError(
                f"logitd is {VERSION} there and {task.version} here: install the same on every "
                "machine"
            )
        weights = read_checkpoint(task.path).weights_sha256
        if weights != task.weights_sha256:
            raise ExtractionError(
                f"{task.path} has other weights there than here (sha256 {weights[:12]} and "
                f"{task.weights_sha256[:12]}): put the same checkpoint on every machine"
            )
        # Beside the threads of this worker, libraries would take those of the machine.
        os.environ["OMP_NUM_THREADS"] = str(task.placing.threads)
        computer = open_computer(task.path, task.wanted, task.placing, lambda line: None)
        facts = {
            **computer.computation,
            "processor": describe(choose_device(str(computer.computation["device"]))),
        }
        agreed = ray.get(self._feed.agree.remote(facts))
        if different := list(differences(agreed, facts)):
            computer.close()
            raise ExtractionError(
                "this worker computes otherwise than the first one, so its shards would have "
                f"other bits: {'; '.join(different)}. Say it by flags (--dtype, --kernels, "
                "--kernel-target, --threads), or leave machines of another kind out of the cluster"
            )
        return computer

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """The answer to the ticket in a batch of one row, as a table of Arrow."""
        import ray

        (ticket,) = (int(number) for number in batch["ticket"])
        if self._computer is None:
            return self._answer(ticket, error=self._refusal)
        if ticket == GREETING:
            return self._answer(ticket, computation=json.dumps(dict(self._computer.computation)))
        try:
            group, deaths = ray.get(self._feed.group.remote(ticket))
            _check_deaths(group, deaths)
            return self._answer(ticket, content=self._computer.shard(group))
        except ExtractionError as error:
            return self._answer(ticket, error=f"on {self._node}: {error}")

    def _answer(
        self, ticket: int, *, error: str = "", computation: str = "", content: bytes = b""
    ) -> Any:
        import pyarrow as arrow

        return arrow.table(
            {
                "ticket": [ticket],
                "error": [error],
                "computation": [computation],
                # Offsets of 64 bits: a shard of stages may be of more than 2 GiB.
                "content": arrow.array([content], type=arrow.large_binary()),
                "node": [self._node],
                "process": [os.getpid()],
                "began_again": [self._began_again],
            }
        )


def _check_deaths(group: Group, deaths: int) -> None:
    """Raise ExtractionError where too many workers died over a shard."""
    if deaths >= DEATHS:
        raise ExtractionError(
            f"{deaths} workers died one after the other over the same shard (from token "
            f"{group[0].start} of {group[0].source} on). Was there memory for it? Give a smaller "
            "--shard-tokens with another --out, or machines with more memory"
        )
