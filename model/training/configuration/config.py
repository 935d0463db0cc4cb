"""TrainingConfig: everything that a person can ask of a training run.

One pydantic model, so that the command line's flags, the environment and `--help` are made from it.
A field left at None takes the preset's value: `model/training/setup/resolve.py` decides every field
once, and the trainer works with what it returns. Does not import torch and opens no file.
"""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from logitd.model.training.configuration.presets import (
    Compile,
    Decay,
    Init,
    Optimizer,
    Recipe,
    SaveDType,
    Shard,
    TrainingDType,
)
from logitd.model.transformer.config import (
    TARGETS,
    Activation,
    Norm,
    NormPosition,
    Positions,
    Residual,
    RopeScaling,
    Target,
    read_rope_scaling,
)

SHAPE_FIELDS = (
    "context_length",
    "n_layer",
    "n_head",
    "n_kv_head",
    "head_dim",
    "d_model",
    "d_ff",
    "norm",
    "norm_position",
    "final_norm",
    "residual",
    "positions",
    "rope_theta",
    "rotary_dim",
    "rope_scaling",
    "activation",
    "bias",
    "qkv_bias",
    "qk_norm",
    "tied_head",
    "head_bias",
    "value_embeddings",
    "dropout",
)
RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))


class TrainingConfig(BaseModel):
    """What to train, on what, for how long, and where to put it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: str = Field("tiny", description="model shape and recipe to start from, by name")
    data: tuple[str, ...] = Field(
        (),
        description="text to train on: files, folders and globs (text, JSON lines, Parquet, gzip), "
        "http and https addresses, shards of another run (*.tokens), or builtin:python (the "
        "reference text and sources of this Python; what is read without any)",
    )
    text_field: str = Field(
        "text", min_length=1, description="field of JSON lines and Parquet that is the text"
    )
    max_download_mb: int = Field(
        1000, ge=1, description="largest file that is downloaded, in millions of bytes"
    )
    data_licence: str | None = Field(
        None, description="licence of the text, for the checkpoint's card"
    )
    out: Path | None = Field(
        None,
        description="run directory (default: runs/PRESET, or runs/N-minutes where minutes are "
        "given without a preset)",
    )
    from_checkpoint: Path | None = Field(
        None,
        description="fine-tune this checkpoint: its shape, vocabulary and weights, with a tenth of "
        "the preset's learning rates and a warmup unless they are given",
    )
    lora: int | None = Field(
        None,
        ge=1,
        description="with --from: train adapters of this rank beside the block matrices and "
        "nothing else; `logitd merge` makes a checkpoint of them",
    )
    lora_alpha: float | None = Field(
        None, gt=0, description="adapters count alpha / rank times (default: the rank, so once)"
    )
    lora_targets: tuple[Target, ...] = Field(
        TARGETS, description="matrices of each block that get adapters"
    )
    resume: bool = Field(
        False, description="go on with the run in the run directory, exactly where it stopped"
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="wall-clock budget; sets the length of the run unless steps are given too, "
        "and, without a preset or a size, chooses the model by this machine's speed",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: int = Field(
        0, ge=0, description="CPU threads (0: all processors, shared by the processes)"
    )

    tokenizer: str | None = Field(
        None,
        description="'own' learns a vocabulary from the text; else gpt2, cl100k_base, o200k_base, "
        "or the path of a ranks file or a tokenizer.json",
    )
    vocab_size: int | None = Field(
        None, ge=257, le=1_000_000, description="size of a vocabulary of one's own"
    )
    chat_template: Path | None = Field(
        None,
        description="file with a chat template (Jinja), for the checkpoints to carry: how a "
        "conversation is written in the text",
    )
    val_fraction: float | None = Field(
        None, gt=0, le=0.5, description="share of the text held out for validation"
    )

    exportable: bool = Field(
        False,
        description="change in the preset's shape exactly what keeps `logitd export` from writing "
        "it for other programs, and refuse what is given and would; costs some bits per byte",
    )
    context_length: int | None = Field(None, ge=1, description="positions of the model")
    n_layer: int | None = Field(None, ge=1, description="blocks")
    n_head: int | None = Field(None, ge=1, description="query heads")
    n_kv_head: int | None = Field(None, ge=1, description="key/value heads (default: n_head)")
    head_dim: int | None = Field(
        None, ge=1, description="width of a head (default: d_model / n_head)"
    )
    d_model: int | None = Field(None, ge=1, description="width of the residual stream")
    d_ff: int | None = Field(
        None, ge=1, description="width of the feed-forward (default: 4 * d_model)"
    )
    norm: Norm | None = Field(None, description="normalisation")
    norm_position: NormPosition | None = Field(
        None, description="before each sublayer or after the residual sum"
    )
    final_norm: bool | None = Field(
        None, description="a norm after the last block (default: with norm_position pre)"
    )
    residual: Residual | None = Field(
        None, description="attention and feed-forward one after the other, or side by side"
    )
    positions: Positions | None = Field(None, description="how positions are encoded")
    rope_theta: float | None = Field(None, gt=1, description="base of rotary positions")
    rotary_dim: int | None = Field(
        None, ge=2, description="channels of each head that turn (default: head_dim)"
    )
    rope_scaling: Annotated[RopeScaling | None, BeforeValidator(read_rope_scaling)] = Field(
        None,
        description="scaled rotary positions, as JSON: "
        """'{"kind": "yarn", "factor": 4, "original_context_length": 2048}', or kind llama3 """
        "or linear",
    )
    activation: Activation | None = Field(None, description="of the feed-forward")
    bias: bool | None = Field(None, description="biases in norms and projections")
    qkv_bias: bool | None = Field(None, description="biases in query, key and value")
    qk_norm: bool | None = Field(None, description="normalise queries and keys per head")
    tied_head: bool | None = Field(None, description="use the embedding matrix as the head")
    head_bias: bool | None = Field(None, description="a bias in the head")
    value_embeddings: bool | None = Field(None, description="gated per-token values")
    dropout: float | None = Field(None, ge=0, lt=1, description="dropout in training")

    steps: int | None = Field(None, ge=1, description="optimizer steps")
    batch_size: int | None = Field(None, ge=1, description="sequences in a forward pass")
    accumulate: int | None = Field(None, ge=1, description="forward passes in a step")
    optimizer: Optimizer | None = Field(
        None, description="of the block matrices; AdamW updates everything else"
    )
    init: Init | None = Field(
        None, description="initial weights: GPT-2's, or with zero-initialised projections"
    )
    matrix_lr: float | None = Field(None, gt=0, description="peak learning rate of block matrices")
    embedding_lr: float | None = Field(None, gt=0, description="the same of embeddings")
    head_lr: float | None = Field(None, gt=0, description="the same of the head, tied or not")
    scalar_lr: float | None = Field(None, gt=0, description="the same of norms, biases and gates")
    momentum: float | None = Field(None, ge=0, lt=1, description="Muon's momentum")
    beta1: float | None = Field(None, ge=0, lt=1, description="AdamW's first beta")
    beta2: float | None = Field(None, ge=0, lt=1, description="AdamW's second beta")
    warmup: int | None = Field(None, ge=0, description="steps of linear rise to the peak")
    decay: Decay | None = Field(None, description="how the learning rate falls")
    cooldown: float | None = Field(
        None, ge=0, le=1, description="share of the run that a linear decay takes"
    )
    final_lr: float | None = Field(
        None, ge=0, le=1, description="last learning rate as a share of the peak"
    )
    weight_decay: float | None = Field(None, ge=0, description="decoupled decay of matrices")
    clip: float | None = Field(None, ge=0, description="largest gradient norm (0: no limit)")
    dtype: TrainingDType | None = Field(
        None, description="dtype of the forward pass; the weights stay float32"
    )
    compile: Compile = Field(
        "auto",
        description="torch.compile the forward and backward pass: auto does so on CUDA, and on a "
        "CPU in runs of about a quarter of an hour or more, because compiling takes a minute",
    )
    shard: Shard = Field(
        "auto",
        description="divide the model, its gradients and optimizer states among the processes "
        "(FSDP), at the cost of communication: auto does so where memory is too small for copies",
    )
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="of initial weights, batches and dropout"
    )

    log_every: int = Field(10, ge=1, description="steps between progress lines")
    eval_every: int | None = Field(None, ge=1, description="steps between evaluations")
    eval_batches: int | None = Field(
        None, ge=1, description="batches of validation text in an evaluation"
    )
    patience: int | None = Field(
        None, ge=1, description="stop after so many evaluations without a new best"
    )
    sample_every: int | None = Field(
        None, ge=1, description="steps between samples (default: with each evaluation)"
    )
    sample_tokens: int = Field(120, ge=1, description="tokens of a sample")
    prompts: tuple[str, ...] = Field(
        (), description="what samples begin with (default: from the text)"
    )
    checkpoint_every: int | None = Field(None, ge=1, description="steps between checkpoints")
    keep: int | None = Field(
        None, ge=1, description="newest checkpoints that are kept; the best is kept besides"
    )
    save_dtype: SaveDType | None = Field(None, description="dtype of the checkpoint's weights")
    tensorboard: bool = Field(
        False, description="write the curves and samples for TensorBoard as well, into the run"
    )

    def given(self) -> dict[str, Any]:
        """The fields of TrainingConfig that were set to something other than None."""
        names = self.model_fields_set & TrainingConfig.model_fields.keys()
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def to_dict(self) -> dict[str, Any]:
        """The fields that were set, as JSON can hold them. `resume` is left out: it is about one
        call and not about the run."""
        names = set(TrainingConfig.model_fields) - {"resume"}
        return self.model_dump(mode="json", include=names, exclude_unset=True)


RESUMABLE = frozenset(
    (
        *("resume", "out", "minutes", "device", "threads", "shard", "steps", "log_every"),
        *("eval_every", "eval_batches", "patience", "sample_every", "sample_tokens", "prompts"),
        *("checkpoint_every", "keep", "save_dtype", "data_licence", "chat_template", "tensorboard"),
        "from_checkpoint",  # it may have moved; the hash of its weights shows that it is the same
    )
)
"""Fields that may change when a run is resumed; any other would make it another run."""


class TrainingError(RuntimeError):
    """Training cannot start or go on; the message says why and what is safe on disk."""


def run_name(config: TrainingConfig) -> str:
    """The name of a run: its preset, or its minutes where they were given without one."""
    if config.minutes is not None and "preset" not in config.model_fields_set:
        return f"{config.minutes:g}-minutes"
    return config.preset


def command(config: TrainingConfig) -> str:
    """The command line of a configuration, without where it runs and writes."""
    words = ["logitd", "train", "--preset", config.preset]
    for name, field in TrainingConfig.model_fields.items():
        value = getattr(config, name)
        if value == field.default or name in _NOT_IN_COMMAND:
            continue
        flag = "--from" if name == "from_checkpoint" else "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words += [flag, _quoted(str(item))]
    return " ".join(words)


_NOT_IN_COMMAND = frozenset(
    {"preset", "out", "resume", "device", "threads", "shard", "data_licence", "tensorboard"}
)


def _quoted(word: str) -> str:
    return word if word and all(c.isalnum() or c in "-_./:=+,*" for c in word) else repr(word)
