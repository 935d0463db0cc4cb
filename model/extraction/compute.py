"""Compute: units through the engine that serves, to the bytes of a shard.

The engine is kept full: before a step its queue always has more prompts than it has slots. Results
come in any order and are put into the order of the plan, so a shard's bytes depend on the units,
the checkpoint and how it is computed, and on nothing else: the engine's results do not depend on
the batch (ARCHITECTURE.md). Reads no text and writes no file.

`Computer` is the seam between planning and writing on one side and computing on the other:
`ShardComputer` computes in this process, `RayComputer` (`on_ray.py`) on many machines.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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
from logitd.model.inference.load import LoadedModel, choose_slots, load_model
from logitd.model.inference.memory import SlotBudget
from logitd.model.inference.options import (
    ComputeOptions,
    SlotDefault,
)
from logitd.model.transformer.config import BLOCK

SLOTS = SlotBudget(default=SlotDefault(EngineConfig().prefill_chunk // BLOCK))
"""As many prompts as a step of a server can compute if each is as short as a block."""
PREFILL_CHUNK = 1024
"""Positions of a step on a CPU. Nobody waits for a token, and windows are cut into fewer pieces,
which changes no bit on a CPU. On a GPU it may, so a step there is that of a server."""

Group = Sequence[Unit]
"""The units of a shard."""
Counted = Callable[[int], None]
"""Callback that gets the number of newly computed tokens."""


class Computer(Protocol):
    """Computes shards, in this process or elsewhere."""

    @property
    def computation(self) -> Mapping[str, Any]:
        """Entries of the index that the bits depend on besides weights, text and settings."""
        ...

    def shards(self, groups: Iterable[Group], tell: Counted = ...) -> Iterator[tuple[Group, bytes]]:
        """Each group with its file, in order; a few groups may be asked for ahead. Raises
        ExtractionError if the model fails."""
        ...


class ShardComputer:
    """A checkpoint and an engine for one quantity. For use by one thread."""

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
        self._config = loaded.checkpoint.config
        self._quantity = quantity
        self._engine = Engine(loaded.gpt, config, make_decoder=loaded.decode_path.make_owner)

    def close(self) -> None:
        """End the threads that compute."""
        self._engine.close()

    def shards(
        self, groups: Iterable[Group], tell: Counted = lambda tokens: None
    ) -> Iterator[tuple[Group, bytes]]:
        """Each group with its file, one after the other."""
        for group in groups:
            yield group, self.shard(group, tell)

    def shard(self, units: Group, tell: Counted = lambda tokens: None) -> bytes:
        """The file of these units. `tell` gets the counted tokens of each finished unit. Raises
        ExtractionError if the model fails."""
        chunks: list[list[Any]] = [[] for _ in units]
        added = unfinished = 0
        while added < len(units) or unfinished:
            while added < len(units) and unfinished < 2 * self._engine.slots:
                request = self._quantity.request(str(added), units[added])
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
                    _require_success(event, units[index])
                    tell(units[index].counted)
                    unfinished -= 1
        in_order = [chunk for of_unit in chunks for chunk in of_unit]
        return self._quantity.file(units, in_order, self._config)


def _require_success(event: FinishEvent, unit: Unit) -> None:
    if event.reason is not FinishReason.STOP:
        raise ExtractionError(
            f"{unit.source} could not be computed from token {unit.start} on: "
            f"{event.error or event.reason.value}"
        )


def open_computer(
    path: Path, quantity: Quantity, options: ComputeOptions, log: Callable[[str], None]
) -> ShardComputer:
    """The checkpoint at `path` in this process, whose torch threads it sets. Raises
    CheckpointError, DeviceError and KernelError."""
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
