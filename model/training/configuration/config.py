"""TrainingConfig: the settings of a training run.

The flags of `logitd train`, its environment variables and its help are generated from this pydantic
model. It includes the fields of `GPTConfig` and `Recipe`; None means the preset's value.
`model/training/configuration/resolve.py` turns it into the immutable `ResolvedTraining`, which the
trainer uses. This module does not import torch and opens no file.
"""

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
"""Fields of the model's shape that have no flag: the recipe sets the vocabulary's size, and the
type of norm sets eps."""
SHAPE_FIELDS = tuple(f.name for f in fields(GPTConfig) if f.name not in _NOT_SET_BY_HAND)
SpecialTokens = Literal["auto", "ids", "text"]
RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))


class TrainingError(RuntimeError):
    """Raised if training cannot start or continue; the message states the reason and what has been
    saved."""


class _RunFields(BaseModel):
    """The settings that belong to neither the shape nor the recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: str = Field("tiny", description="model shape and recipe to start from, by name")
    data: tuple[str, ...] = Field(
        (),
        description="text to train on: files, folders and globs (text, JSON, CSV, Parquet, gzip), "
        "http and https addresses, shards of another run (*.tokens), or builtin:python (the "
        "reference text and sources of this Python; the default)",
    )
    text_field: TextField = "text"
    split_at: SplitAt = None
    special_tokens: SpecialTokens = Field(
        "auto",
        description="encoding of special tokens' names in the text: ids (as the tokens' ids) or "
        "text (as plain text); auto means ids with a chat template, otherwise text",
    )
    max_download_mb: MaxDownload = 1000
    data_licence: str | None = Field(
        None, description="license of the text, for the checkpoint's card"
    )
    out: Path | None = Field(
        None,
        description="run directory (default: runs/PRESET, or runs/N-minutes if minutes are "
        "given without a preset)",
    )
    from_checkpoint: Path | None = Field(
        None,
        description="fine-tune this checkpoint, or the best one of this run: starts with its "
        "shape, vocabulary and weights, with a tenth of the preset's learning rates and a "
        "warmup unless they are set",
    )
    lora: int | None = Field(
        None,
        ge=1,
        description="with --from: train only adapters of this rank for the block matrices; "
        "`logitd merge` merges them into the checkpoint",
    )
    lora_alpha: float | None = Field(
        None, gt=0, description="alpha of the adapters, which scale by alpha / rank (default: rank)"
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
        description="wall-clock limit of the whole command, from its start to the last "
        "checkpoint; sets the length of the run unless steps are set too, and, "
        "without a preset or a size, chooses the model by this machine's speed",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: int = Field(
        0, ge=0, description="CPU threads (0: all processors, shared by the processes)"
    )
    compile: Compile = Field(
        "auto",
        description="torch.compile the forward and backward pass: auto compiles on CUDA (with "
        "--minutes, from 2 minutes on), and on a CPU if the run would take two fast cores about 15 "
        "minutes or more, because compiling takes a minute or more",
    )
    shard: Shard = Field(
        "auto",
        description="divide the model, its gradients and optimizer states among the processes "
        "(FSDP), at the cost of communication: auto does so if memory is too small for copies",
    )
    log_every: int = Field(10, ge=1, description="steps between progress lines")
    sample_tokens: int = Field(120, ge=1, description="tokens per sample")
    prompts: tuple[str, ...] = Field(
        (), description="prompt of a sample, used as it is (default: excerpts of the text)"
    )
    chat_template: Path | None = Field(
        None, description="file with a chat template (Jinja) for the checkpoints"
    )
    tensorboard: bool = Field(
        False, description="also write the curves and samples for TensorBoard, into the run"
    )
    exportable: bool = Field(
        False,
        description="change the preset's shape so that `logitd export` can write it for other "
        "programs, and refuse any given value that prevents it; costs some bits "
        "per byte",
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

    @property
    def run_name(self) -> str:
        """Name of the run: the preset, or the minutes if they are set without a preset."""
        if self.minutes is not None and "preset" not in self.model_fields_set:
            return f"{self.minutes:g}-minutes"
        return self.preset

    @property
    def run_path(self) -> Path:
        return self.out or Path("runs") / self.run_name

    def given(self) -> dict[str, Any]:
        """The fields that the user set to a value other than None."""
        names = self.model_fields_set & TrainingConfig.model_fields.keys()
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def filled(self, values: Mapping[str, Any]) -> "TrainingConfig":
        """A copy in which `values` replace the fields that the user did not set."""
        given = self.given()
        return self.model_copy(update={k: v for k, v in values.items() if k not in given})

    def to_dict(self) -> dict[str, Any]:
        """The fields that the user set, as JSON values. `resume` is omitted, because it belongs to
        one command and not to the run."""
        names = set(TrainingConfig.model_fields) - {"resume"}
        return self.model_dump(mode="json", include=names, exclude_unset=True)
