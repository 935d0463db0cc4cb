"""Compute: turns the units of each shard into the bytes of its file, with the serving engine.

Before each step the engine's queue has more prompts than the engine has slots, so that all slots
are in use. Results arrive in any order and are written in the order of the units. The engine's
results do not depend on the batch (ARCHITECTURE.md), so the bytes of a shard depend only on the
units, the checkpoint and the compute options.

`ShardComputer` computes in this process, `RayComputer` (`on_ray.py`) on many machines.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from logitd.model.device import use_threads
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.plan import Unit
from logitd.model.extraction.quantities import Quantity
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import (
    FinishEvent,
    FinishReason,
    OutputsChunk,
    ScoresChunk,
)
from logitd.model.inference.engine.requests import Request
from logitd.model.inference.load import LoadedModel, choose_slots, load_model
from logitd.model.inference.memory import SlotBudget
from logitd.model.inference.options import ComputeOptions, SlotDefault
from logitd.model.transformer.config import BLOCK

SLOTS = SlotBudget(default=SlotDefault(EngineConfig().prefill_chunk // BLOCK))
"""The default number of slots is the server's default number of positions in a step, divided by
BLOCK. So even prompts of only BLOCK positions each can fill such a step."""
PREFILL_CHUNK = 1024
"""Number of positions in a step on a CPU: more than in a server, because no client waits for a
token. On a GPU the results may depend on this number, so the server's default is used there."""

Group = Sequence[Unit]
"""The units of a shard."""
Counted = Callable[[int], None]
"""A function that is called with the number of newly computed tokens."""


class ShardComputer:
    """An engine for one checkpoint and one quantity, for use by one thread. `computation` has the
    device, the dtype and everything else about the computation that affects the results. The index
    stores `computation`."""

    def __init__(
        self, loaded: LoadedModel, quantity: Quantity, computation: Mapping[str, Any]
    ) -> None:
        self.computation = computation
        on_cpu = loaded.placement.device.type == "cpu"
        slots, _ = choose_slots(loaded, SLOTS)
        config = EngineConfig(
            slots=slots,
            prefill_chunk=PREFILL_CHUNK if on_cpu else EngineConfig().prefill_chunk,
        )
        self._config = loaded.checkpoint.shape
        self._quantity = quantity
        self._engine = Engine(loaded.network, config, make_decoder=loaded.decode_path.make_owner)

    def close(self) -> None:
        self._engine.close()

    def shards(self, groups: Iterable[Group], tell: Counted) -> Iterator[tuple[Group, bytes]]:
        """Yield each group with the content of its file, in order."""
        for group in groups:
            yield group, self.shard(group, tell)

    def shard(self, units: Group, tell: Counted = lambda tokens: None) -> bytes:
        """The content of the file for these units. Each time a unit is finished, `tell` is called
        with the number of its counted tokens. Raises ExtractionError if the model fails."""
        chunks = self.chunks(units, self._quantity.request, tell)
        return self._quantity.file(units, [c for unit in chunks for c in unit], self._config)

    def chunks(
        self,
        units: Group,
        request_of: Callable[[str, Unit], Request | None],
        tell: Counted = lambda tokens: None,
    ) -> list[list[Any]]:
        """Compute the chunks of each unit. `request_of` creates the request for a unit, given a
        request id and the unit; it returns None if the unit needs no computation. Raises
        ExtractionError if the model fails."""
        chunks: list[list[Any]] = [[] for _ in units]
        added = unfinished = 0
        while added < len(units) or unfinished:
            while added < len(units) and unfinished < 2 * self._engine.slots:
                request = request_of(str(added), units[added])
                if request is None:
                    tell(units[added].counted)
                else:
                    self._engine.add(request)
                    unfinished += 1
                added += 1
            for event in self._engine.step().events:
                index = int(event.request_id)
                if isinstance(event, ScoresChunk | OutputsChunk):
                    chunks[index].append(event)
                if isinstance(event, OutputsChunk):
                    self._engine.grant(event.request_id)
                if isinstance(event, FinishEvent):
                    if event.reason is not FinishReason.STOP:
                        raise ExtractionError(
                            f"{units[index].source} could not be computed from token "
                            f"{units[index].start} on: {event.error or event.reason.value}"
                        )
                    tell(units[index].counted)
                    unfinished -= 1
        return chunks


def open_computer(
    path: Path, quantity: Quantity, options: ComputeOptions, log: Callable[[str], None]
) -> ShardComputer:
    """Open a ShardComputer for the checkpoint at `path`. Also sets the number of torch's threads in
    this process. Raises CheckpointError, DeviceError and KernelError."""
    loaded = load_model(path, options, slots=SLOTS, log=log)
    placement = loaded.placement
    use_threads(placement.threads)
    computation = {
        "device": str(placement.device),
        "dtype": placement.dtype_name,
        "quantize": options.quantize,
        "decoding": loaded.decode_path.name,
        "threads": placement.threads,
    }
    return ShardComputer(loaded, quantity, computation)
