"""EngineConfig: sizes that bound the engine's memory and its steps. Standard library only."""

from dataclasses import dataclass

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.options import DecodeSteps, KVCacheDType, Speculation, TargetGap

SERVED_TARGET_GAP, SERVED_TARGET_TTFT = DecodeSteps(3), 0.5
"""Defaults of a server, whose clients wait for each token. `benchmarks/LAB.md` has measurements
with other values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes that bound the engine's memory and its steps. `service/settings/serve.py` checks the
    values that users choose.

    slots          number of sequences in the KV cache
    prefill_chunk  maximum number of prompt positions in a step, a multiple of 32
    target_gap     time limit of a step while sequences decode, and so of the gap between two tokens
                   (`model/inference/engine/budget.py`). None: only `prefill_chunk` bounds a step,
                   for the most tokens per second. A gap is supported only on a CPU, because on
                   other devices the time of a prompt is not yet known at the end of its step
    target_ttft    seconds within which first tokens should arrive, not counting the time of their
                   own prompts. If they would arrive later, steps may take longer than `target_gap`.
                   Requires `target_gap`
    prefix_reuse   copy a prompt's prefix from any slot that holds it instead of computing it
    kv_cache_dtype the model's dtype, or int8 (on a CPU), which rounds keys and values; reading
                   them takes a quarter (float32) or half (bfloat16) of the time
    speculate      source of drafted tokens (`model/inference/engine/ngram.py`); drafts change the
                   time of a reply, never its tokens
    """

    slots: int = 16
    prefill_chunk: int = 256
    target_gap: TargetGap | None = None
    target_ttft: float | None = None
    prefix_reuse: bool = True
    kv_cache_dtype: KVCacheDType = "auto"
    speculate: Speculation = "none"

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InvalidRequest(f"slots is {self.slots}; it must be at least 1", "slots")
        if self.target_ttft is not None and self.target_gap is None:
            raise InvalidRequest(
                f"target_ttft is {self.target_ttft}, but target_gap is not set: set it, or remove "
                "target_ttft",
                "target_ttft",
            )
