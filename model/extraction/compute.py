"""Compute: units through the engine that serves, to the bytes of a shard.

The engine is kept full: before a step there are always more prompts in its queue than it has slots.
Results come in any order and are put into that of the plan, so a shard's bytes depend on the units,
the checkpoint and how it is computed, and on nothing else: not on the batch, because of what the
engine promises (ARCHITECTURE.md). Reads no text and writes no file.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from model.extraction.errors import ExtractionError
from model.extraction.plan import Unit
from model.extraction.shards import TokenRows, parquet_shard, safetensors_shard
from model.extraction.wanted import Logprobs, Stages, Wanted
from model.inference.engine.config import EngineConfig
from model.inference.engine.cost import split_activations
from model.inference.engine.engine import Engine
from model.inference.engine.events import (
    Event,
    FinishEvent,
    FinishReason,
    OutputsChunk,
    PromptEvent,
    PromptToken,
)
from model.inference.load import LoadedModel, Slots, choose_slots
from model.inference.memory import SlotBudget
from model.transformer.config import BLOCK

SLOTS = Slots(SlotBudget(), EngineConfig().prefill_chunk // BLOCK)
"""As many prompts as a step can compute at once, be they as short as a block."""


class ShardComputer:
    """A checkpoint and an engine for one kind of result. One thread may use it."""

    def __init__(self, loaded: LoadedModel, wanted: Wanted) -> None:
        config = EngineConfig(slots=choose_slots(loaded, SLOTS))
        self._config = loaded.checkpoint.config
        self._wanted = wanted
        self._engine = Engine(loaded.gpt, config, make_decoder=loaded.decode_path.make_decoder)

    def close(self) -> None:
        """End the threads that compute."""
        self._engine.close()

    def shard(
        self, units: Sequence[Unit], tell: Callable[[int], None] = lambda tokens: None
    ) -> bytes:
        """The file of these units. `tell` gets the counted tokens of each unit that is done. Raises
        ExtractionError where the model fails."""
        events = self._run(units, tell)
        match self._wanted:
            case Logprobs() as wanted:
                rows = [
                    token_rows([token for event in got for token in event.tokens]) for got in events
                ]
                return parquet_shard(units, rows, top=wanted.top_k > 0)
            case Stages() as wanted:
                return safetensors_shard(units, [self._values(wanted, got) for got in events])

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
                self._engine.add(self._wanted.request(str(added), unit.token_ids, unit.context))
                added += 1
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
        if isinstance(event, PromptEvent):
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


def token_rows(tokens: Sequence[PromptToken]) -> TokenRows:
    """What is said of tokens, as arrays. Logprobs are rounded to float32."""
    chosen = [token.chosen for token in tokens]
    likeliest = [entry for token in tokens for entry in token.top]
    return TokenRows(
        logprobs=np.array(
            [np.nan if entry is None else entry.logprob for entry in chosen], dtype=np.float32
        ),
        predicted=np.array([entry is not None for entry in chosen], dtype=np.bool_),
        counts=np.array([len(token.top) for token in tokens], dtype=np.int32),
        top_tokens=np.array([entry.token_id for entry in likeliest], dtype=np.int32),
        top_logprobs=np.array([entry.logprob for entry in likeliest], dtype=np.float32),
    )
