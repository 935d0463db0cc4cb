"""EngineConfig: the sizes that bound the engine's memory and its steps. Standard library only."""

from dataclasses import dataclass
from typing import get_args

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.options import DecodeSteps, KVCacheDType, Speculation, TargetGap
from logitd.model.transformer.config import BLOCK

SERVED_TARGET_GAP = DecodeSteps(4)
"""Where tokens are waited for one by one. The longest gaps of eight streams of GPT-2 124M in int8
were 5 times their usual length then, instead of 14, at the same tokens per second
(`benchmarks/closed_loop.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes that bound the engine's memory and its steps.

    slots          sequences that can be in the KV cache at once
    prefill_chunk  prompt positions computed per step at most, whole blocks of 32
    target_gap     how long a step should take at most while others decode, which is how long these
                   wait for their next tokens (`model/inference/engine/budget.py`); None:
                   `prefill_chunk` alone bounds a step, which is the most tokens a second. Needs
                   a device that computes nothing behind the host's back (a CPU)
    prefix_reuse   whether a new prompt copies a shared prefix from any slot instead of
                   computing it
    kv_cache_dtype what keys and values are kept in: the model's dtype, or int8, which is read in a
                   quarter or half of the time and rounds them (on a CPU)
    speculate      where drafts come from, tokens that a decode step verifies behind the last one
                   (`model/inference/engine/ngram.py`); they change how long an answer takes, not
                   the answer
    """

    slots: int = 16
    prefill_chunk: int = 256
    target_gap: TargetGap | None = None
    prefix_reuse: bool = True
    kv_cache_dtype: KVCacheDType = "auto"
    speculate: Speculation = "none"

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InvalidRequest(f"slots is {self.slots}; at least 1 is needed", "slots")
        if self.prefill_chunk < BLOCK or self.prefill_chunk % BLOCK:
            raise InvalidRequest(
                f"prefill_chunk is {self.prefill_chunk}; it must be a positive multiple of {BLOCK}",
                "prefill_chunk",
            )
        least = 1 if isinstance(self.target_gap, DecodeSteps) else 0
        if self.target_gap is not None and _number(self.target_gap) <= least:
            raise InvalidRequest(
                f"target_gap is {self.target_gap}, which leaves nothing for prompts", "target_gap"
            )
        if self.speculate not in get_args(Speculation):
            raise InvalidRequest(
                f"speculate is {self.speculate!r}; it is {' or '.join(get_args(Speculation))}",
                "speculate",
            )


def _number(target: TargetGap) -> float:
    return target.count if isinstance(target, DecodeSteps) else target
