"""Presets: model shapes and training recipes by name.

Flags can override any value of a preset (`model/training/configuration/config.py`). This module
does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.shapes import MODERN, ORIGINAL, gpt2_shape

NANOGPT: Mapping[str, Any] = {"bias": False, "qkv_bias": False, "activation": "gelu"}
"""Arguments that make `gpt2_shape` return nanoGPT's model: learned positions, LayerNorm without
bias, exact GELU, tied head."""

Optimizer = Literal["muon", "adamw"]
Init = Literal["gpt2", "modern"]
Decay = Literal["linear", "cosine", "constant"]
TrainingDType = Literal["auto", "float32", "bfloat16"]
Compile = Literal["auto", "on", "off"]
Shard = Literal["auto", "on", "off"]
SaveDType = Literal["float32", "bfloat16"]


Rate = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Steps = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The settings of optimization, data and evaluation. `TrainingConfig` has the same fields, but
    allows None.

    With linear decay the learning rate is constant, then falls linearly over the last `cooldown`
    share of the run; with cosine decay it falls from the start. Both end at `final_lr` times the
    peak.
    """

    steps: Annotated[Steps, Field(description="optimizer steps")]
    batch_size: Annotated[
        int,
        Field(
            ge=1,
            description="sequences in a forward pass (default: the preset's number, or, "
            "with another context length, as many tokens)",
        ),
    ]
    accumulate: Annotated[int, Field(ge=1, description="forward passes in a step")] = 1
    optimizer: Annotated[
        Optimizer, Field(description="optimizer of the block matrices; AdamW updates the rest")
    ] = "muon"
    init: Annotated[
        Init,
        Field(description="initial weights: as in GPT-2, or modern (output projections are zero)"),
    ] = "modern"
    matrix_lr: Annotated[Rate, Field(description="peak learning rate of block matrices")]
    embedding_lr: Annotated[Rate, Field(description="peak learning rate of embeddings")]
    head_lr: Annotated[
        Rate,
        Field(
            description="peak learning rate of the head, even if tied; with muon it falls to half "
            "in the first few hundred steps"
        ),
    ]
    scalar_lr: Annotated[
        Rate, Field(description="peak learning rate of norms, biases, gates and scales")
    ]
    momentum: Annotated[Beta, Field(description="Muon's momentum")] = 0.95
    beta1: Annotated[Beta, Field(description="AdamW's first beta")] = 0.9
    beta2: Annotated[Beta, Field(description="AdamW's second beta")] = 0.95
    warmup: Annotated[int, Field(ge=0, description="steps of linear warmup to the peak")] = 0
    decay: Annotated[Decay, Field(description="shape of the decay of the learning rate")] = "linear"
    cooldown: Annotated[
        Share, Field(description="duration of a linear decay (share of the run)")
    ] = 0.6
    short_windows: Annotated[
        Share,
        Field(
            description="share of the run that trains on short windows first: a quarter of the "
            "context length, at least 128 tokens, with as many tokens in a step"
        ),
    ] = 0.0
    final_lr: Annotated[Share, Field(description="final learning rate, as a share of the peak")] = (
        0.0
    )
    weight_decay: Annotated[float, Field(ge=0, description="weight decay of matrices")] = 0.0
    average: Annotated[
        Share,
        Field(
            description="time constant of the average of the weights, as a share of the run; the "
            "last checkpoint has the average if it is better (0: no average)"
        ),
    ] = 0.05
    clip: Annotated[float, Field(ge=0, description="largest gradient norm (0: no limit)")] = 0.0
    dtype: Annotated[
        TrainingDType, Field(description="dtype of the forward pass; weights are float32")
    ] = "auto"
    seed: Annotated[
        int, Field(ge=0, lt=2**63, description="seed of initial weights, batches and dropout")
    ] = 1337
    tokenizer: Annotated[
        str,
        Field(
            description="'own' learns a vocabulary from the text; otherwise an encoding of "
            "tiktoken, such as gpt2 or cl100k_base, or the path of a ranks file or a tokenizer.json"
        ),
    ] = "own"
    vocab_size: Annotated[
        int, Field(ge=257, le=1_000_000, description="size of a vocabulary that is learned")
    ] = 2048
    val_fraction: Annotated[
        float, Field(gt=0, le=0.5, description="share of the text held out for validation")
    ] = 0.1
    eval_every: Annotated[Steps, Field(description="steps between evaluations")]
    eval_batches: Annotated[
        int | None, Field(ge=1, description="batches in an evaluation (default: the whole text)")
    ] = None
    sample_every: Annotated[
        int | None, Field(ge=1, description="steps between samples (default: eval_every)")
    ] = None
    checkpoint_every: Annotated[Steps, Field(description="steps between checkpoints")]
    keep: Annotated[
        int,
        Field(ge=1, description="number of recent checkpoints to keep; the best is always kept"),
    ] = 2
    keep_every: Annotated[
        int | None,
        Field(
            ge=1,
            description="also keep the weights of every N-th step in the run's history, "
            "of steps 0, 1, 2, 4, 8 and so on below N, and of the last step, for `logitd serve "
            "--history`; never removed. Not kept: steps with a suspect loss and, with minutes, "
            "steps in the time that is reserved for saving the last one",
        ),
    ] = None
    save_dtype: Annotated[SaveDType, Field(description="dtype of saved weights")] = "float32"
    patience: Annotated[
        int | None, Field(ge=1, description="evaluations without a new best before the run stops")
    ] = None

    def keeps(self, step: int) -> bool:
        """True if the history gets a checkpoint of this step. Early steps are kept more often,
        because attention heads form early."""
        every = self.keep_every
        return every is not None and (step % every == 0 or (step < every and step.bit_count() == 1))


@dataclass(frozen=True)
class Preset:
    """A recipe and a model shape: all arguments of `gpt2_shape` except the vocabulary."""

    shape: Mapping[str, Any]
    recipe: Recipe

    def config(self, vocab_size: int, **overrides: Any) -> GPTConfig:
        """The shape of this preset for a vocabulary. `overrides` replace the preset's values."""
        return gpt2_shape(vocab_size=vocab_size, **{**self.shape, **overrides})


def _adamw(lr: float, **values: Any) -> Recipe:
    """A recipe in GPT-2's style: AdamW with the same learning rate for all parameters."""
    rates: Any = {"matrix_lr": lr, "embedding_lr": lr, "head_lr": lr, "scalar_lr": lr}
    return Recipe(optimizer="adamw", init="gpt2", average=0.0, **rates, **values)


_COSINE: Any = {"decay": "cosine", "final_lr": 0.1, "weight_decay": 0.1, "clip": 1.0}
"""nanoGPT's schedule and regularization."""

_LEARNS_FASTEST: Any = {**MODERN, "value_embeddings": "all"}
"""Value embeddings in every block. Compared with value embeddings in every second block, they lower
the bits per byte after the same number of steps: by 2.7 % in `small`, and by 1.3 % in `tiny` on a
million characters."""

PRESETS: Mapping[str, Preset] = {
    "tiny": Preset(
        shape={
            **_LEARNS_FASTEST,
            "n_layer": 4,
            "n_head": 2,
            "d_model": 128,
            "context_length": 1024,
        },
        recipe=Recipe(
            steps=1200,
            batch_size=2,
            vocab_size=1024,
            matrix_lr=0.035,
            embedding_lr=0.1,
            head_lr=0.004,
            scalar_lr=0.01,
            short_windows=0.7,
            eval_every=200,
            eval_batches=16,
            checkpoint_every=400,
        ),
    ),
    "small": Preset(
        shape={
            **_LEARNS_FASTEST,
            "n_layer": 6,
            "n_head": 4,
            "d_model": 256,
            "context_length": 1024,
        },
        # Four passes over the text that comes with Python 3.11, of 568 steps and two evaluations
        # each. A fifth pass lowered only the training loss. The run ends at the end of a pass:
        # early in the next one the model still remembers some windows, and validation is 2 % worse.
        recipe=Recipe(
            steps=2272,
            batch_size=4,
            vocab_size=2048,
            matrix_lr=0.03,
            embedding_lr=0.1,
            head_lr=0.004,
            scalar_lr=0.01,
            short_windows=0.7,
            weight_decay=0.05,
            eval_every=284,
            checkpoint_every=1136,
            save_dtype="bfloat16",
        ),
    ),
    "gpt2-124m": Preset(
        shape={"n_layer": 12, "n_head": 12, "d_model": 768, "context_length": 1024},
        recipe=_adamw(
            6e-4,
            **_COSINE,
            tokenizer="gpt2",
            steps=600_000,
            batch_size=12,
            accumulate=40,
            warmup=2000,
            eval_every=1000,
            eval_batches=200,
            checkpoint_every=1000,
            val_fraction=0.01,
        ),
    ),
    "decoder-8x64": Preset(
        shape={
            **ORIGINAL,
            "n_layer": 8,
            "n_head": 4,
            "d_model": 64,
            "context_length": 16,
            "qkv_bias": True,
            "dropout": 0.1,
        },
        recipe=_adamw(
            1e-3,
            vocab_size=4096,
            steps=5000,
            batch_size=4,
            beta2=0.999,
            decay="constant",
            weight_decay=0.01,
            dtype="float32",
            val_fraction=0.2,
            eval_every=50,
            eval_batches=20,
            sample_every=1000,  # evaluations are so frequent that samples would take longer
            checkpoint_every=1000,
        ),
    ),
    # nanoGPT's model and AdamW at the size of `tiny`. Learning rates of 1e-3, 2e-3, 3e-3, 4e-3 and
    # 6e-3 were tried with batches of 0.5, 1 and 2 thousand tokens, for 75 s on one core: 2e-3 with
    # the smallest batch has the fewest bits per byte.
    "nanogpt": Preset(
        shape={**NANOGPT, "n_layer": 4, "n_head": 2, "d_model": 128, "context_length": 256},
        recipe=_adamw(
            2e-3,
            **_COSINE,
            steps=2400,
            batch_size=4,
            vocab_size=1024,
            beta2=0.99,
            warmup=100,
            eval_every=400,
            eval_batches=32,
            sample_every=800,
            checkpoint_every=800,
        ),
    ),
    # train.py config/train_shakespeare_char.py --device=cpu --block_size=64 --batch_size=12
    # --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
    # --eval_iters=20, with a validation loss of 1.88 nats per character of tiny-shakespeare in
    # nanoGPT's README. Its vocabulary is the characters of the text; here it is the 256 bytes,
    # which is equivalent for plain ASCII, except that some rows are never used.
    "nanogpt-char": Preset(
        shape={**NANOGPT, "n_layer": 4, "n_head": 4, "d_model": 128, "context_length": 64},
        recipe=_adamw(
            1e-3,
            **_COSINE,
            vocab_size=257,
            steps=2000,
            batch_size=12,
            beta2=0.99,
            warmup=100,
            dtype="float32",
            eval_every=250,
            eval_batches=20,
            sample_every=1000,
            checkpoint_every=1000,
        ),
    ),
}
"""Every preset by its name; `model/training/README.md` describes them."""
