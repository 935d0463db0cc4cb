"""Compute: units through the engine that serves, to the bytes of a shard.

The engine is kept full: before a step there are always more prompts in its queue than it has slots.
Results come in any order and are put into that of the plan, so a shard's bytes depend on the units,
the checkpoint and how it is computed, and on nothing else: not on the batch, because of what the
engine promises (ARCHITECTURE.md). Reads no text and writes no file.

`Computer` is the seam between what plans and writes and what computes: `ShardComputer` in this
process, `RayComputer` (`on_ray.py`) on many machines, whose workers have a ShardComputer each.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from logitd.model.device import use_threads
from logitd.model.dtypes import DTypeName
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.plan import Unit
from logitd.model.extraction.shards import (
    LensRows,
    TokenRows,
    lens_shard,
    parquet_shard,
    safetensors_shard,
)
from logitd.model.extraction.wanted import LensFigures, Logprobs, Stages, Wanted
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.cost import split_activations
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import (
    Event,
    FinishEvent,
    FinishReason,
    OutputsChunk,
    ScoresChunk,
)
from logitd.model.inference.load import LoadedModel, Slots, choose_slots, load_model
from logitd.model.inference.memory import SlotBudget
from logitd.model.inference.options import KernelChoice, KernelTarget, Quantization, SlotDefault
from logitd.model.inference.sampling.lens import lens_width
from logitd.model.transformer.config import BLOCK

SLOTS = Slots(SlotBudget(), SlotDefault(EngineConfig().prefill_chunk // BLOCK))
"""As many prompts as a step of a server can compute at once, be they as short as a block."""
PREFILL_CHUNK = 1024
"""Positions of a step on a CPU: nobody waits for a token meanwhile, and windows are cut into fewer
pieces, which changes no bit there. On a GPU it may, so there a step is that of a server."""


Group = Sequence[Unit]
"""The units of a shard."""
Counted = Callable[[int], None]
"""Is told how many tokens more are computed."""


@dataclass(frozen=True, slots=True)
class Placing:
    """How a checkpoint is computed, as for `logitd serve`."""

    device: str = "auto"
    dtype: DTypeName = "auto"
    threads: int = 0
    kernels: KernelChoice = "auto"
    kernel_target: KernelTarget = "auto"
    quantize: Quantization = "none"


AUTO = Placing()
"""What suits this machine."""


class Computer(Protocol):
    """What computes shards, wherever it does."""

    @property
    def computation(self) -> Mapping[str, Any]:
        """What the bits depend on besides weights, text and settings, as the index says it."""
        ...

    def shards(self, groups: Iterable[Group], tell: Counted = ...) -> Iterator[tuple[Group, bytes]]:
        """Each group with the file that is made of it, in order. A few groups may be asked for
        ahead. Raises ExtractionError where the model fails."""
        ...

    def close(self) -> None:
        """End what computes."""
        ...


class ShardComputer:
    """A checkpoint and an engine for one kind of result. One thread may use it."""

    def __init__(self, loaded: LoadedModel, wanted: Wanted, computation: Mapping[str, Any]) -> None:
        self.computation = computation
        on_cpu = loaded.placement.device.type == "cpu"
        config = EngineConfig(
            slots=choose_slots(loaded, SLOTS).count,
            prefill_chunk=PREFILL_CHUNK if on_cpu else EngineConfig().prefill_chunk,
        )
        self._config = loaded.checkpoint.config
        self._wanted = wanted
        self._engine = Engine(
            loaded.gpt,
            config,
            make_decoder=loaded.decode_path.make_owner,
        )

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
        """The file of these units. `tell` gets the counted tokens of each unit that is done. Raises
        ExtractionError where the model fails."""
        events = self._run(units, tell)
        match self._wanted:
            case Logprobs() as wanted:
                rows = [token_rows(unit, got) for unit, got in zip(units, events, strict=True)]
                return parquet_shard(units, rows, top=wanted.top_k > 0)
            case Stages() as wanted:
                return safetensors_shard(units, [self._values(wanted, got) for got in events])
            case LensFigures() as wanted:
                figures = [
                    lens_rows(wanted, unit, got) for unit, got in zip(units, events, strict=True)
                ]
                return lens_shard(units, figures)

    def _values(self, wanted: Stages, chunks: Sequence[Any]) -> dict[str, npt.NDArray[Any]]:
        """The stages of a unit, each (counted tokens, ...)."""
        rows = np.concatenate([chunk.rows for chunk in chunks])  # (tokens, elements)
        values: dict[str, npt.NDArray[Any]] = split_activations(
            rows,
            wanted.output,
            self._config,
            1,  # no stage here has the prompt's length
        )
        return values

    def _run(self, units: Sequence[Unit], tell: Callable[[int], None]) -> list[list[Any]]:
        """The events with values of each unit, in order."""
        results: list[list[Any]] = [[] for _ in units]
        added = unfinished = 0
        while added < len(units) or unfinished:
            while added < len(units) and unfinished < 2 * self._engine.slots:
                unit = units[added]
                request = self._wanted.request(str(added), unit.token_ids, unit.context)
                added += 1
                if request is None:
                    tell(unit.counted)
                    continue
                self._engine.add(request)
                unfinished += 1
            for event in self._engine.step().events:
                unfinished -= self._take(event, units, results, tell)
        return results

    def _take(
        self,
        event: Event,
        units: Sequence[Unit],
        results: list[list[Any]],
        tell: Callable[[int], None],
    ) -> bool:
        """Keep what an event has; whether it was the last of its unit."""
        index = int(event.request_id)
        if isinstance(event, ScoresChunk):
            results[index].append(event)
        elif isinstance(event, OutputsChunk):
            self._engine.grant(event.request_id)
            results[index].append(event)
        elif isinstance(event, FinishEvent):
            unit = units[index]
            if event.reason is not FinishReason.STOP:
                raise ExtractionError(
                    f"{unit.source} could not be computed from token {unit.start} on: "
                    f"{event.error or event.reason.value}"
                )
            tell(unit.counted)
            return True
        return False


def open_computer(
    path: Path, wanted: Wanted, placing: Placing, log: Callable[[str], None]
) -> ShardComputer:
    """The checkpoint at `path` in this process, whose torch threads it sets. Raises
    CheckpointError, DeviceError and KernelError."""
    loaded = load_model(
        path,
        device=placing.device,
        dtype=placing.dtype,
        threads=placing.threads,
        kernels=placing.kernels,
        kernel_target=placing.kernel_target,
        quantize=placing.quantize,
        slots=SLOTS,
        log=log,
    )
    placement = loaded.placement
    use_threads(placement.threads)
    computation = {
        "device": str(placement.device),
        "dtype": placement.dtype_name,
        "quantize": placing.quantize,
        "decoding": loaded.decode_path.name,
        "threads": placement.threads,
    }
    return ShardComputer(loaded, wanted, computation)


def token_rows(unit: Unit, chunks: Sequence[ScoresChunk]) -> TokenRows:
    """What is said of a unit's tokens: of all but a document's first. Logprobs are rounded to
    float32."""
    logprobs = _joined([chunk.logprobs for chunk in chunks], np.float32)
    unpredicted = 0 if unit.context else 1
    if len(logprobs) != unit.counted - unpredicted:
        raise ExtractionError(
            f"{len(logprobs)} of the {unit.counted - unpredicted} tokens of {unit.source} from "
            f"{unit.start + unit.context} on were scored: a bug of the engine's"
        )
    return TokenRows(
        logprobs=np.concatenate([np.full(unpredicted, np.nan, np.float32), logprobs]),
        predicted=np.arange(unit.counted) >= unpredicted,
        counts=np.concatenate(
            [
                np.zeros(unpredicted, dtype=np.int32),
                _joined([chunk.counts for chunk in chunks], np.int32),
            ]
        ),
        top_tokens=_joined([chunk.top_ids for chunk in chunks], np.int32),
        top_logprobs=_joined([chunk.top_logprobs for chunk in chunks], np.float32),
    )


def _joined(parts: Sequence[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    """Parts one behind the other, in another dtype; there may be none."""
    return np.concatenate([np.empty(0, kind), *parts]).astype(kind)


def lens_rows(wanted: LensFigures, unit: Unit, chunks: Sequence[OutputsChunk]) -> LensRows:
    """What a lens says of a unit's tokens, as arrays: of all but a document's first."""
    layers, top_k = wanted.layers, wanted.top_k
    numbers = (
        np.concatenate([chunk.rows for chunk in chunks])  # (P, L, width), as LensDigest gives it
        if chunks
        else np.empty((0, layers, lens_width(top_k, 1)), dtype=np.float32)
    )
    predicted = np.ones(unit.counted, dtype=np.bool_)
    predicted[: unit.counted - len(numbers)] = False
    logprobs, ranks, entropies, divergences = np.moveaxis(numbers[..., 2 * top_k :], -1, 0)
    return LensRows(
        predicted=predicted,
        logprobs=logprobs,
        ranks=ranks.astype(np.int32),
        entropies=entropies,
        divergences=divergences,
        top_tokens=numbers[..., :top_k].astype(np.int32),
        top_logprobs=numbers[..., top_k : 2 * top_k],
    )
