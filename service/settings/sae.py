"""Settings of `logitd sae`, which trains sparse autoencoders."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg

from logitd.model.data.sources.read_options import MaxDownload, SplitAt, TextField
from logitd.service.settings.common import AsJson, CheckpointPath, ComputeSettings

_BY_TIME = (
    lambda given: given.get("tokens") is None,
    "it determines the length of the training, as --tokens does: set only one of the two",
)


class SaeSettings(ComputeSettings):
    """Settings of `logitd sae`."""

    command = "sae"
    groups: ClassVar = {
        "action": "input and output",
        "features": "autoencoder",
        "minutes": "training",
        "device": "computation",
        "as_json": "output",
    }
    flag_names: ClassVar = {"as_json": "json"}
    needs: ClassVar = {"minutes": _BY_TIME}

    action: CliPositionalArg[Literal["train"]] = Field(
        description="train: learn the features of a stage from a text"
    )
    checkpoint: CliPositionalArg[CheckpointPath]
    stage: str = Field(
        description="stage that the autoencoder reads and reconstructs, such as blocks.3.output or "
        "blocks.3.mlp.out (GET /stages lists the names)"
    )
    data: tuple[str, ...] = Field(
        min_length=1,
        description="text to train on: files, folders and quoted globs (text, JSON, CSV, Parquet, "
        "gzip), addresses, or builtin:python",
    )
    out: Path = Field(description="folder to write, in SAELens' format")
    text_field: TextField = "text"
    split_at: SplitAt = None
    max_download_mb: MaxDownload = 1000
    features: int | None = Field(
        None,
        ge=2,
        le=2**20,
        description="number of features (default: 8 times the width of the stage)",
    )
    k: int = Field(
        32, ge=1, le=4096, description="number of features that reconstruct the stage at a position"
    )
    tokens: int | None = Field(
        None,
        ge=1,
        description="tokens to train on, in whole batches of 1,024, instead of --minutes: with the "
        "same seed and threads, the result then has the same bits",
    )
    minutes: float = Field(
        10,
        gt=0,
        le=10_000,
        description="total minutes for reading, training, and measuring the result",
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="seed of the initial weights and of the order of the data"
    )
    as_json: AsJson = False
