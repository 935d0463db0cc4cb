"""EngineConfig: the sizes that bound the engine's memory and its steps. Standard library only."""

from dataclasses import dataclass
from typing import get_args

from model.inference.errors import InvalidRequest
from model.inference.options import Speculation
from model.transformer.config import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes that bound the engine's memory and its steps.

    slots          sequences that can be in the KV cache at once
    prefill_chunk  prompt positions computed per step at most, whole blocks of 32
    prefix_reuse   whether a new prompt copies a shared prefix from any slot instead of
                   computing it
    speculate      where drafts come from, tokens that a decode step verifies behind the last one
                   (`model/inference/engine/ngram.py`); they change how long an answer takes, not
                   the answer
    """

    slots: int = 16
    prefill_chunk: int = 256
    prefix_reuse: bool = True
    speculate: Speculation = "none"

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InvalidRequest(f"slots is {self.slots}; at least 1 is needed", "slots")
        if self.prefill_chunk < BLOCK or self.prefill_chunk % BLOCK:
            raise InvalidRequest(
                f"prefill_chunk is {self.prefill_chunk}; it must be a positive multiple of {BLOCK}",
                "prefill_chunk",
            )
        if self.speculate not in get_args(Speculation):
            raise InvalidRequest(
                f"speculate is {self.speculate!r}; it is {' or '.join(get_args(Speculation))}",
                "speculate",
            )
