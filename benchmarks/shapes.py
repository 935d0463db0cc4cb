"""The shapes that are measured, by the names that commands give them. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT-2: heads share the width, the feed-forward is four times as wide, the head is tied."""

    vocab_size: int
    context_length: int
    n_layer: int
    n_head: int
    d_model: int


SMALL = Shape(vocab_size=300, context_length=64, n_layer=2, n_head=2, d_model=64)
"""For trying a command out: its numbers mean nothing."""
SHAPES = {
    "124m": Shape(vocab_size=50_257, context_length=1024, n_layer=12, n_head=12, d_model=768),
    "30m": Shape(vocab_size=50_257, context_length=1024, n_layer=6, n_head=6, d_model=384),
    "small": SMALL,
}
BATCHES = (1, 8, 32)
