"""Synthetic checkpoints: any shape with random weights, for figures that depend only on sizes.

The vocabulary is the 256 bytes, then pairs of bytes, then triples. tiktoken accepts it, and it can
be as large as the vocabulary of any peer's model. The weights are random, so the generated text is
noise.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES, Shape
from logitd.model.checkpoint.checkpoint import CheckpointInfo, TrainingRecord, save_checkpoint
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.text.tokenizer import END_OF_TEXT, SPLIT_PATTERN, Tokenizer
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.shapes import gpt2_shape

LLAMA: Mapping[str, Any] = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "activation": "swiglu",
    "bias": False,
    "qkv_bias": False,
}
"""Overrides that turn `gpt2_shape` into a Llama, except for heads and widths."""


RANDOM = TrainingRecord(
    step=0,
    tokens=0,
    val_loss=None,
    val_bits_per_byte=None,
    data={"name": "none: random weights", "licence": "none"},
    created="2026-01-01T00:00:00Z",
)


def load_gpt(name: str, dtype: torch.dtype) -> GPT:
    """A synthetic GPT of a shape in SHAPES, or the GPT of the checkpoint at `name`."""
    if name not in SHAPES:
        return load_checkpoint(Path(name), device=torch.device("cpu"), dtype=dtype)[1]
    return synthetic_gpt(config_of(SHAPES[name])).to(dtype)


def config_of(shape: Shape) -> GPTConfig:
    """Configuration of the GPT with this shape."""
    return gpt2_shape(
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        d_model=shape.d_model,
        n_kv_head=shape.kv_heads,
        d_ff=shape.hidden,
        **(LLAMA if shape.family == "llama" else {}),
    )


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` tokens, of which END_OF_TEXT is the last."""
    letters = range(97, 123)
    longer = itertools.chain(
        itertools.product(range(256), repeat=2),
        itertools.product(letters, range(256), letters),
    )
    tokens = itertools.chain(((byte,) for byte in range(256)), longer)
    ranks = {
        bytes(token): rank for rank, token in enumerate(itertools.islice(tokens, vocab_size - 1))
    }
    return Tokenizer(
        ranks=ranks, pattern=SPLIT_PATTERN, special_tokens={END_OF_TEXT: vocab_size - 1}
    )


def synthetic_gpt(config: GPTConfig) -> GPT:
    """A GPT of this shape, randomly initialized like GPT-2, with the same weights each time."""
    torch.manual_seed(0)
    return GPT(config).eval().requires_grad_(False)


def save_synthetic(path: Path, config: GPTConfig) -> CheckpointInfo:
    """Save a GPT of this shape at `path`."""
    return save_with_tokenizer(path, synthetic_gpt(config))


def save_with_tokenizer(path: Path, gpt: GPT) -> CheckpointInfo:
    """Save a GPT at `path`, with a made-up vocabulary of the same size."""
    return save_checkpoint(
        path,
        config=gpt.config,
        weights=gpt.state_dict(),
        tokenizer=synthetic_tokenizer(gpt.config.vocab_size),
        training=RANDOM,
        card=f"# {path.name}\n\nRandom weights, for measurements.\n",
    )
