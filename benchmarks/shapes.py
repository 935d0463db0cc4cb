"""Shapes that are measured, by their names on command lines. Imports only the standard library."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT-2 or a Llama. The width is divided among the attention heads, and the output head is
    tied.

    family     "gpt2", or "llama" with RMSNorm, rotary positions, SwiGLU and no biases
    n_kv_head  number of heads of keys and values; None: as many as query heads
    d_ff       hidden width of the feed-forward; None: four times d_model
    """

    vocab_size: int
    context_length: int
    n_layer: int
    n_head: int
    d_model: int
    family: Literal["gpt2", "llama"] = "gpt2"
    n_kv_head: int | None = None
    d_ff: int | None = None

    def __post_init__(self) -> None:
        if self.family == "gpt2" and (self.n_kv_head, self.d_ff) != (None, None):
            raise ValueError(
                "a GPT-2 sets neither n_kv_head nor d_ff, which follow from n_head and d_model"
            )

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def hidden(self) -> int:
        """Width of the feed-forward."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff


SMALL = Shape(vocab_size=300, context_length=64, n_layer=2, n_head=2, d_model=64)
"""A shape for trying out a command: its numbers are meaningless."""
SMALL_LLAMA = Shape(
    vocab_size=300, context_length=64, n_layer=2, n_head=4, d_model=64,
    family="llama", n_kv_head=2, d_ff=128,
)  # fmt: skip
SHAPES = {
    "124m": Shape(vocab_size=50_257, context_length=1024, n_layer=12, n_head=12, d_model=768),
    "30m": Shape(vocab_size=50_257, context_length=1024, n_layer=6, n_head=6, d_model=384),
    "llama-114m": Shape(
        vocab_size=50_257, context_length=9216, n_layer=12, n_head=12, d_model=768,
        family="llama", n_kv_head=4, d_ff=2048,
    ),
    "llama-416m": Shape(
        vocab_size=50_257, context_length=9216, n_layer=24, n_head=16, d_model=1024,
        family="llama", n_kv_head=4, d_ff=4096,
    ),
    "small": SMALL,
    "small-llama": SMALL_LLAMA,
}  # fmt: skip
"""Shapes by name. The Llamas have room for prompts of 8,192 ids and their continuations."""
BATCHES = (1, 8, 32)
