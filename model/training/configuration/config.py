"""TrainingConfig: everything that a user can set for a training run.

One pydantic model, from which the command line's flags, the environment and `--help` are made. The
fields of a shape and of a recipe are those of `GPTConfig` and of `Recipe`; None takes the preset's
value. `model/training/configuration/resolve.py` decides every field once, and the trainer works
with what it returns. Does not import torch and opens no file.
"""

import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from logitd.model.data.sources.read_options import MaxDownload, SplitAt, TextField
from logitd.model.optional_fields import with_optional_fields
from logitd.model.training.configuration.presets import Compile, Recipe, Shard
from logitd.model.transformer.config import TARGETS, GPTConfig, Target

_NOT_SET_BY_HAND = ("vocab_size", "padded_vocab_size", "norm_eps")
"""The vocabulary's size is the recipe's, and eps goes with the kind of norm."""
SHAPE_FIELDS = tuple(f.name for f in fields(GPTConfig) if f.name not in _NOT_SET_BY_HAND)
SpecialTokens = Literal["auto", "ids", "text"]
RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))


class _RunFields(BaseModel):
    """The fields that neither a shape nor a recipe has."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: str = Field("tiny", description="model shape and recipe to start from, by name")
    data: tuple[str, ...] = Field(
        (),
        description="text to train on: files, folders and globs (text, JSON, CSV, Parquet, gzip), "
        "http and https addresses, shards of another run (*.tokens), or builtin:python (the "
        "reference text and sources of this Python; what is read without any)",
    )
    text_field: TextField = "text"
    split_at: SplitAt = None
    special_tokens: SpecialTokens = Field(
        "auto",
        description="what the name of a special token in the text becomes: its id, or plain text; "
        "auto is ids with a chat template, whose names become ids too",
    )
    max_download_mb: MaxDownload = 1000
    data_licence: str | None = Field(
        None, description="licence of the text, for the checkpoint's card"
    )
    out: Path | None = Field(
        None,
        description="run directory (default: runs/PRESET, or runs/N-minutes if minutes are "
        "given without a preset)",
    )
    from_checkpoint: Path | None = Field(
        None,
        description="fine-tune this checkpoint, or the best of this run: its shape, vocabulary and "
        "weights, with a tenth of the preset's learning rates and a warmup unless they are given",
    )
    lora: int | None = Field(
        None,
        ge=1,
        description="with --from: train only adapters of this rank of the block matrices; "
        "`logitd merge` makes a checkpoint of them",
    )
    lora_alpha: float | None = Field(
        None, gt=0, description="factor of the adapters, divided by the rank (default: the rank)"
    )
    lora_targets: tuple[Target, ...] = Field(
        TARGETS, description="matrices of each block that get adapters"
    )
    resume: bool = Field(
        False, description="continue the run in the run directory, exactly where it stopped"
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="wall-clock budget of the whole command, from its start to the last "
        "checkpoint; sets the length of the run unless steps are given too, "
        "and, without a preset or a size, chooses the model by this machine's speed",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: int = Field(
        0, ge=0, description="CPU threads (0: all processors, shared by the processes)"
    )
    compile: Compile = Field(
        "auto",
        description="torch.compile the forward and backward pass: auto does so on CUDA (with "
        "--minutes from 5 on), and on a CPU in runs of about a quarter of an hour or more at the "
        "speed of two fast cores, because compiling takes a minute or more",
    )
    shard: Shard = Field(
        "auto",
        description="divide the model, its gradients and optimizer states among the processes "
        "(FSDP), at the cost of communication: auto does so if memory is too small for copies",
    )
    log_every: int = Field(10, ge=1, description="steps between progress lines")
    sample_tokens: int = Field(120, ge=1, description="tokens of a sample")
    prompts: tuple[str, ...] = Field(
        (), description="beginnings of the samples (default: from the text)"
    )
    chat_template: Path | None = Field(
        None, description="file with a chat template (Jinja) that the checkpoints carry"
    )
    tensorboard: bool = Field(
        False, description="also write the curves and samples for TensorBoard, into the run"
    )
    exportable: bool = Field(
        False,
        description="change the preset's shape so that `logitd export` can write it for other "
        "programs, and refuse a given value that prevents it; costs some bits per byte",
    )


if TYPE_CHECKING:
    _AllFields = _RunFields
else:
    _AllFields = with_optional_fields(
        with_optional_fields(_RunFields, GPTConfig, SHAPE_FIELDS), Recipe, RECIPE_FIELDS
    )


class TrainingConfig(_AllFields):
    """The settings of a training run."""

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def given(self) -> dict[str, Any]:
        """The fields that were set to something other than None."""
        names = self.model_fields_set & TrainingConfig.model_fields.keys()
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def to_dict(self) -> dict[str, Any]:
        """The fields that were set, as JSON. `resume` is left out: it belongs to one command, not
        to the run."""
        names = set(TrainingConfig.model_fields) - {"resume"}
        return self.model_dump(mode="json", include=names, exclude_unset=True)


NEEDS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "cooldown": ("decay", ("linear",)),
    "final_lr": ("decay", ("linear", "cosine")),
    "momentum": ("optimizer", ("muon",)),
    "rope_theta": ("positions", ("rotary",)),
    "rotary_dim": ("positions", ("rotary",)),
    "rope_scaling": ("positions", ("rotary",)),
    "vocab_size": ("tokenizer", ("own", "the checkpoint's")),
    "save_dtype": ("lora", (None,)),  # adapters are saved in float32
}
"""Fields that do nothing unless another field has one of some values, the usual one first."""
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
    """Training cannot start or continue; the message says why and what is safe on disk."""


def run_name(config: TrainingConfig) -> str:
    """The name of a run: its preset, or its minutes if they were given without one."""
    if config.minutes is not None and "preset" not in config.model_fields_set:
        return f"{config.minutes:g}-minutes"
    return config.preset


def command(config: TrainingConfig) -> str:
    """The command line of a configuration, without devices and paths that it writes."""
    words = ["logitd", "train", "--preset", config.preset]
    for name, field in TrainingConfig.model_fields.items():
        value = getattr(config, name)
        if value == field.default or name in _NOT_IN_COMMAND:
            continue
        flag = "--from" if name == "from_checkpoint" else "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words += [flag, str(item)]
    return shlex.join(words)


_NOT_IN_COMMAND = frozenset(
    {"preset", "out", "resume", "device", "threads", "shard", "data_licence", "tensorboard"}
)
