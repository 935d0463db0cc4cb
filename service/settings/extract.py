"""Settings of `logitd extract`."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from logitd.model.data.sources.read_options import MaxDownload, SplitAt, TextField
from logitd.service.settings.common import (
    AsJson,
    CheckpointPath,
    CommaList,
    ComputeSettings,
)

StageNames = Annotated[
    CommaList[str],
    Field(
        description="write the values of these stages instead, as safetensors: names and patterns "
        "separated by commas, such as embedding,blocks.*.output (GET /stages lists the names)"
    ),
]


class ExtractSettings(ComputeSettings):
    """Settings of `logitd extract`."""

    command = "extract"
    groups: ClassVar = {
        "checkpoint": "input and output",
        "logprobs": "values",
        "stride": "windows and shards",
        "device": "computation",
        "ray": "computation",
    }
    flag_names: ClassVar = {"as_json": "json"}
    needs: ClassVar = {
        "ray_workers": (
            lambda given: given.get("ray"),
            "it is a number of processes of a Ray cluster: add --ray",
        ),
    }

    checkpoint: CliPositionalArg[CheckpointPath]
    data: tuple[str, ...] = Field(
        min_length=1,
        description="text to compute on: files, folders and quoted globs (text, JSON, CSV, "
        "Parquet, gzip), addresses, or builtin:python",
    )
    out: Path = Field(
        description="folder to write; if it is unfinished, the same flags continue it"
    )
    logprobs: bool = Field(False, description="write the logprob of each token")
    top_k: int | None = Field(
        None,
        ge=1,
        description="also write the K likeliest tokens at each place, with their logprobs; with "
        "--lens those of each layer (default 5)",
    )
    lens: bool = Field(
        False,
        description="write instead the prediction of each layer, as if the model stopped there: "
        "logprob and rank of the token, the likeliest tokens, entropy, divergence from the last "
        "layer",
    )
    stages: StageNames = ()
    stride: int | None = Field(
        None,
        ge=1,
        description="number of tokens of each window of a long document that are written; the "
        "window's other tokens are context (default: as many as fit, which is fastest)",
    )
    shard_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of a shard, and so the most tokens that are lost if the process is "
        "killed (default: 262,144; for stages and the lens as many as fill 256 MiB)",
    )
    text_field: TextField = "text"
    split_at: SplitAt = None
    max_download_mb: MaxDownload = 1000
    ray: str | None = Field(
        None,
        description="compute on a Ray cluster whose machines have the same files: the address of "
        "the cluster (host:6379), auto for the cluster of this machine, or local to start Ray here",
    )
    ray_workers: int | None = Field(
        None,
        ge=1,
        description="Ray processes that each hold the model (default: as many as fit, each with "
        "--threads threads, and with a GPU if there are any)",
    )
    as_json: AsJson = False
