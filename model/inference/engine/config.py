"""EngineConfig: sizes that bound the engine's memory and its steps. Standard library only."""

from dataclasses import dataclass
from typing import get_args

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.options import DecodeSteps, KVCacheDType, Speculation, TargetGap
from logitd.model.transformer.config import BLOCK

SERVED_TARGET_GAP = DecodeSteps(4)
"""Default of a server, because its clients wait for each token. It cut the longest gaps of eight
streams of GPT-2 124M in int8 from 14 to 5 times their usual length, at the same tokens per second
(`benchmarks/closed_loop.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes that bound the engine's memory and its steps.

    slots          number of sequences in the KV cache
    prefill_chunk  most prompt positions of a step, a multiple of 32
    target_gap     longest time of a step while sequences decode, and so between their tokens
                   (`model/inference/engine/budget.py`). None: only `prefill_chunk` bounds a step,
                   for the most tokens per second. Needs a CPU, because only there the time of a
                   prompt is known at the end of its step
    prefix_reuse   copy a prompt's prefix from any slot that holds it instead of computing it
    kv_cache_dtype the model's dtype, or int8 (on a CPU), which rounds keys and values and takes a
                   quarter or half of the time to read
    speculate      source of drafted tokens (`model/inference/engine/ngram.py`); drafts change the
                   time of a reply, never its tokens
    """

    slots: int = 16
    prefill_chunk: int = 256
    target_gap: TargetGap | None = None
    prefix_reuse: bool = True
    kv_cache_dtype: KVCacheDType = "auto"
    speculate: Speculation = "none"

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InvalidRequest(f"slots is {self.slots}; it must be at least 1", "slots")
        if self.prefill_chunk < BLOCK or self.prefill_chunk % BLOCK:
            raise InvalidRequest(
                f"prefill_chunk is {self.prefill_chunk}; it must be a positive multiple of {BLOCK}",
                "prefill_chunk",
            )
        gap = self.target_gap
        if gap is not None and (gap.count <= 1 if isinstance(gap, DecodeSteps) else gap <= 0):
            raise InvalidRequest(
                f"target_gap is {gap}, which leaves no time for prompts: raise it", "target_gap"
            )
        if self.speculate not in get_args(Speculation):
            raise InvalidRequest(
                f"speculate is {self.speculate!r}; use {' or '.join(get_args(Speculation))}",
                "speculate",
            )
