"""Settings of the commands that train: `logitd train`, `eval` and `merge`."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from logitd.model.data.sources.read_options import MaxDownload, SplitAt, TextField
from logitd.model.inference.options import KVCacheDType, Quantization
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.presets import SaveDType, TrainingDType
from logitd.service.settings.common import (
    BUNDLED_CHECKPOINT,
    AsJson,
    CheckpointPath,
    CommandSettings,
    Device,
    RunCode,
    Threads,
)


class TrainSettings(CommandSettings, TrainingConfig):
    """Settings of `logitd train`: the training configuration."""

    model_config = CommandSettings.model_config  # other commands share .env
    command = "train"
    groups: ClassVar = {
        "preset": "task",
        "out": "run",
        "device": "computation",
        "log_every": "reports and samples",
        "exportable": "model shape (default: the preset's)",
        "dropout": "recipe (default: the preset's)",
        "tokenizer": "vocabulary",
        "eval_every": "evaluations and checkpoints",
        "watch": "reports and samples",
    }
    flag_names: ClassVar = {"from_checkpoint": "from"}

    watch: bool = Field(
        False,
        description="draw the loss curve, the figures, the time left and the newest samples on "
        "the terminal, instead of printing lines",
    )


class EvalSettings(CommandSettings):
    """Settings of `logitd eval`."""

    command = "eval"
    groups: ClassVar = {"checkpoint": "measurement", "device": "computation", "as_json": "output"}
    flag_names: ClassVar = {"as_json": "json"}

    checkpoint: CliPositionalArg[CheckpointPath] = BUNDLED_CHECKPOINT
    data: tuple[str, ...] = Field(
        (),
        description="text to measure on, used in full: files, folders and globs, addresses "
        "(default: the text held out from the checkpoint's training, if found)",
    )
    text_field: TextField = "text"
    split_at: SplitAt = None
    max_download_mb: MaxDownload = 1000
    stride: int | None = Field(
        None,
        ge=1,
        description="number of tokens measured in each window; the window's other tokens are "
        "context (default: the whole window, as in training)",
    )
    batch_size: int = Field(8, ge=1, le=4096, description="windows per forward pass")
    device: Device = "auto"
    dtype: TrainingDType = Field(
        "auto",
        description="dtype of the computation, as in training; auto is bfloat16 if the device "
        "multiplies bfloat16, otherwise float32",
    )
    threads: Threads = 0
    quantize: Quantization = Field(
        "none",
        description="measure the model with weights in 8 bits (int8) or 4 bits (int4), using "
        "decode steps, which is slower",
    )
    kv_cache_dtype: KVCacheDType = Field(
        "auto",
        description="int8 measures the model with keys and values in 8 bits, using decode "
        "steps, which is slower",
    )
    run_code: RunCode = False
    as_json: AsJson = False


class MergeSettings(CommandSettings):
    """Settings of `logitd merge`."""

    command = "merge"
    groups: ClassVar = {"base": "paths"}

    base: CliPositionalArg[Path] = Field(
        description="checkpoint that the adapter was trained on, or the run that has it as its "
        "best checkpoint"
    )
    adapter: CliPositionalArg[Path] = Field(
        description="directory of an adapter, or of the `logitd train --lora` run that wrote one"
    )
    dest: CliPositionalArg[Path] = Field(description="checkpoint directory to write")
    save_dtype: SaveDType = Field("float32", description="dtype of the checkpoint's weights")
