"""Presets: model shapes and training recipes by name.

A preset is a starting point: every number in it can be given anew on the command line
(`model/training/configuration/config.py`). Covers the names and their values. Does not import
torch, does not build or train anything, and what its fields do is told where they are used
(`model/transformer/config.py`, `model/training/optim/optimizers.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from logitd.model.transformer.config import MODERN, ORIGINAL, GPTConfig, gpt2_shape

NANOGPT: Mapping[str, Any] = {"bias": False, "qkv_bias": False, "activation": "gelu"}
"""Overrides that make `gpt2_shape` nanoGPT's model: learned positions, LayerNorm without bias,
exact GELU, tied head."""

Optimizer = Literal["muon", "adamw"]
Init = Literal["gpt2", "modern"]
Decay = Literal["linear", "cosine", "constant"]
TrainingDType = Literal["auto", "float32", "bfloat16"]
Compile = Literal["auto", "on", "off"]
Shard = Literal["auto", "on", "off"]
SaveDType = Literal["float32", "bfloat16"]


class PresetError(ValueError):
    """A preset that does not exist; the message lists those that do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a model is trained. `TrainingConfig` has a field of the same name for each of these.

    tokenizer, vocab_size      "own" learns vocab_size tokens from the text; else a published
                               encoding, ranks or a tokenizer.json, which bring their own size
    steps                      optimizer steps
    batch_size, accumulate     sequences in a forward pass, and passes in a step
    optimizer, init            the update rule of the block matrices, and the initial weights
    *_lr                       peak learning rates: block matrices, embeddings, head, and the rest
    momentum, beta1, beta2     Muon's momentum; AdamW's two
    warmup                     steps of linear rise to the peak
    decay, cooldown, final_lr  linear: flat, then straight down over the last `cooldown` share of
                               the run; cosine: from the peak on; both end at `final_lr` * peak
    weight_decay, clip         decoupled decay of matrices; largest gradient norm (0: no limit)
    eval_every, eval_batches   steps between evaluations; batches of each (None: the whole text)
    sample_every               steps between samples (None: at each evaluation)
    checkpoint_every, keep     steps between checkpoints; how many stay (`best` stays besides)
    patience                   evaluations without a new best before the run stops (None: never)
    """

    steps: int
    batch_size: int
    accumulate: int = 1
    tokenizer: str = "own"
    vocab_size: int = 2048
    optimizer: Optimizer = "muon"
    init: Init = "modern"
    matrix_lr: float
    embedding_lr: float
    head_lr: float
    scalar_lr: float
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    warmup: int = 0
    decay: Decay = "linear"
    cooldown: float = 0.6
    final_lr: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    dtype: TrainingDType = "auto"
    seed: int = 1337
    val_fraction: float = 0.1
    eval_every: int
    eval_batches: int | None = None
    sample_every: int | None = None
    checkpoint_every: int
    keep: int = 2
    save_dtype: SaveDType = "float32"
    patience: int | None = None


@dataclass(frozen=True)
class Preset:
    """A model shape (all of `gpt2_shape`'s arguments but the vocabulary) and its recipe."""

    name: str
    summary: str
    shape: Mapping[str, Any]
    recipe: Recipe

    def config(self, vocab_size: int, **overrides: Any) -> GPTConfig:
        """The model of this preset for a vocabulary; `overrides` replace values of the shape."""
        return gpt2_shape(vocab_size=vocab_size, **{**self.shape, **overrides})


def preset(name: str) -> Preset:
    """A preset by its name."""
    if name not in PRESETS:
        raise PresetError(f"unknown preset {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]


_ALL = (
    Preset(
        name="tiny",
        summary="1.3 M parameters, about three minutes on one core: to see everything work",
        shape={**MODERN, "n_layer": 4, "n_head": 2, "d_model": 128, "context_length": 256},
        recipe=Recipe(
            steps=1200,
            batch_size=8,
            vocab_size=1024,
            matrix_lr=0.035,
            embedding_lr=0.1,
            head_lr=0.004,
            scalar_lr=0.01,
            eval_every=200,
            eval_batches=16,
            checkpoint_every=400,
        ),
    ),
    Preset(
        name="small",
        summary="7.3 M parameters, half an hour on two cores: the bundled checkpoint",
        shape={
            **MODERN,
            "n_layer": 6,
            "n_head": 4,
            "d_model": 256,
            "context_length": 512,
        },
        # Four passes over the text that Python 3.11 carries, 568 steps each, evaluated twice in
        # each. A fifth one lowered the loss of training alone. It ends with a pass: soon after the
        # begin of one, some windows come again that are still known by heart, and validation is 2 %
        # worse for a while.
        recipe=Recipe(
            steps=2272,
            batch_size=8,
            vocab_size=2048,
            matrix_lr=0.03,
            embedding_lr=0.1,
            head_lr=0.004,
            scalar_lr=0.01,
            weight_decay=0.05,
            eval_every=284,
            checkpoint_every=1136,
            save_dtype="bfloat16",
        ),
    ),
    Preset(
        name="gpt2-124m",
        summary="GPT-2 small, 124 M parameters, with nanoGPT's AdamW recipe; wants a GPU",
        shape={"n_layer": 12, "n_head": 12, "d_model": 768, "context_length": 1024},
        recipe=Recipe(
            tokenizer="gpt2",
            steps=600_000,
            batch_size=12,
            accumulate=40,
            optimizer="adamw",
            init="gpt2",
            matrix_lr=6e-4,
            embedding_lr=6e-4,
            head_lr=6e-4,
            scalar_lr=6e-4,
            warmup=2000,
            decay="cosine",
            final_lr=0.1,
            weight_decay=0.1,
            clip=1.0,
            eval_every=1000,
            eval_batches=200,
            checkpoint_every=1000,
            val_fraction=0.01,
        ),
    ),
    Preset(
        name="decoder-8x64",
        summary="the 2017 decoder, 8 layers of 64, context 16: the classroom model",
        shape={
            **ORIGINAL,
            "n_layer": 8,
            "n_head": 4,
            "d_model": 64,
            "context_length": 16,
            "qkv_bias": True,
            "dropout": 0.1,
        },
        recipe=Recipe(
            vocab_size=4096,
            steps=5000,
            batch_size=4,
            optimizer="adamw",
            init="gpt2",
            matrix_lr=1e-3,
            embedding_lr=1e-3,
            head_lr=1e-3,
            scalar_lr=1e-3,
            beta2=0.999,
            decay="constant",
            weight_decay=0.01,
            dtype="float32",
            val_fraction=0.2,
            eval_every=50,
            eval_batches=20,
            sample_every=1000,  # evaluations are so near each other that samples would take longer
            checkpoint_every=1000,
        ),
    ),
    Preset(
        # nanoGPT's model and AdamW at the size of `tiny`. Of the learning rates 1e-3, 2e-3, 3e-3,
        # 4e-3 and 6e-3 and of batches of 0.5, 1 and 2 thousand tokens, with each of which it was
        # trained for 75 s on one core, 2e-3 with the smallest gave the fewest bits per byte.
        name="nanogpt",
        summary="nanoGPT's model and recipe at the size of `tiny`: what to compare with",
        shape={**NANOGPT, "n_layer": 4, "n_head": 2, "d_model": 128, "context_length": 256},
        recipe=Recipe(
            steps=2400,
            batch_size=4,
            vocab_size=1024,
            optimizer="adamw",
            init="gpt2",
            matrix_lr=2e-3,
            embedding_lr=2e-3,
            head_lr=2e-3,
            scalar_lr=2e-3,
            beta2=0.99,
            warmup=100,
            decay="cosine",
            final_lr=0.1,
            weight_decay=0.1,
            clip=1.0,
            eval_every=400,
            eval_batches=32,
            sample_every=800,
            checkpoint_every=800,
        ),
    ),
    Preset(
        # train.py config/train_shakespeare_char.py --device=cpu --block_size=64 --batch_size=12
        # --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
        # --eval_iters=20, for which nanoGPT's README gives a validation loss of 1.88 nats per
        # character of tiny-shakespeare. Its vocabulary is the characters of the text; here it is
        # the 256 bytes, which on plain ASCII is the same with rows that are never used.
        name="nanogpt-char",
        summary="nanoGPT's character-level model for a CPU, on the bytes of any text",
        shape={**NANOGPT, "n_layer": 4, "n_head": 4, "d_model": 128, "context_length": 64},
        recipe=Recipe(
            vocab_size=257,
            steps=2000,
            batch_size=12,
            optimizer="adamw",
            init="gpt2",
            matrix_lr=1e-3,
            embedding_lr=1e-3,
            head_lr=1e-3,
            scalar_lr=1e-3,
            beta2=0.99,
            warmup=100,
            decay="cosine",
            final_lr=0.1,
            weight_decay=0.1,
            clip=1.0,
            dtype="float32",
            eval_every=250,
            eval_batches=20,
            sample_every=1000,
            checkpoint_every=1000,
        ),
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})
"""Every preset by its name."""
