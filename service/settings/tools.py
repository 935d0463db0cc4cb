"""Settings of `logitd generate`, `extract`, `inspect`, `export`, `health` and `bench`."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import CliPositionalArg

from logitd.model.data.sources.read_options import MaxDownload, SplitAt, TextField
from logitd.service.settings.common import (
    BUNDLED_CHECKPOINT,
    AsJson,
    BatchCode,
    CheckpointPath,
    CommaList,
    CommandSettings,
    ComputeSettings,
    KVCacheCells,
    StoredDType,
)


def _distinct(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"{','.join(map(str, sizes))} lists a size twice: give each size once")
    return sizes


BatchSizes = Annotated[
    CommaList[Annotated[int, Field(ge=1, le=4096)]],
    AfterValidator(_distinct),
    Field(
        min_length=1,
        description="numbers of sequences that decode together, separated by commas",
    ),
]


_NOT_GREEDY = (
    lambda given: given.get("temperature") != 0,
    "it has no effect with --temperature 0, which always takes the likeliest token: remove one of "
    "the two",
)
_WITHOUT_URL = (
    lambda given: given.get("url") is None,
    "the server's address is given twice: use either the address or --host and --port",
)


class GenerateSettings(ComputeSettings):
    """Settings of `logitd generate`."""

    command = "generate"
    groups: ClassVar = {"prompt": "text", "device": "computation"}
    needs: ClassVar = dict.fromkeys(("top_k", "top_p", "seed"), _NOT_GREEDY)

    prompt: CliPositionalArg[str] = Field(
        description='text to continue; for a model without a vocabulary, token ids such as "0 1 2"'
    )
    checkpoint: CheckpointPath = BUNDLED_CHECKPOINT
    max_tokens: int = Field(200, ge=1, description="maximum number of generated tokens")
    temperature: float = Field(
        0.8, ge=0, description="sampling temperature; 0 always takes the likeliest token"
    )
    top_k: int = Field(0, ge=0, description="sample from the k likeliest tokens; 0 means all")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample from the likeliest tokens whose probabilities add up to p",
    )
    seed: int = Field(
        -1, ge=-1, lt=2**64, description="the same seed gives the same text; -1 draws a seed"
    )
    n: int = Field(1, ge=1, le=64, description="number of completions")


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
            "it is the number of processes on a Ray cluster: add --ray",
        ),
        "stored_dtype": (
            lambda given: given.get("stages"),
            "it is the dtype of values of stages: add --stages",
        ),
        "sample": (
            lambda given: given.get("stages"),
            "it is a share of the tokens whose stages are written: add --stages",
        ),
        "sample_seed": (
            lambda given: given.get("sample", 1.0) < 1,
            "it chooses the tokens of a sample: add --sample",
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
        description="also write the K likeliest tokens at each position, with their logprobs; "
        "with --lens the likeliest tokens of each layer (default: 5)",
    )
    lens: bool = Field(
        False,
        description="write the prediction of each layer instead, as if the model stopped there: "
        "logprob and rank of the token, the likeliest tokens, entropy, and divergence of the last "
        "layer's prediction from it",
    )
    stages: StageNames = ()
    stored_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="dtype of the written values of --stages"
    )
    sample: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the tokens whose --stages are written, chosen at random",
    )
    sample_seed: int = Field(
        0, ge=0, lt=2**63, description="seed of --sample: the same seed chooses the same tokens"
    )
    stride: int | None = Field(
        None,
        ge=1,
        description="number of tokens written from each window of a long document; the "
        "window's other tokens are context (default: as many as fit, which is "
        "fastest)",
    )
    shard_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens per shard, which is also the most that can be lost if the process "
        "is killed (default: 262,144, or fewer if they would fill 256 MiB)",
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


class InspectSettings(CommandSettings):
    """Settings of `logitd inspect`."""

    command = "inspect"
    groups: ClassVar = {"paths": "input"}
    flag_names: ClassVar = {"as_json": "json"}

    paths: CliPositionalArg[tuple[Path, ...]] = Field(
        (BUNDLED_CHECKPOINT,), description="a checkpoint, a run directory, or several of these"
    )
    text: str = Field(
        "def main():",
        description="text to run through the checkpoint, or through the best checkpoint of a run; "
        'for a model without a vocabulary, token ids, by default "0 1 2"',
    )
    as_json: AsJson = False


class ExportSettings(CommandSettings):
    """Settings of `logitd export`."""

    command = "export"
    groups: ClassVar = {"checkpoint": "input and output"}
    needs: ClassVar = {
        "pre": (
            lambda given: given.get("to") == "gguf",
            "it names the split pattern of a GGUF file: add --to gguf",
        ),
    }

    checkpoint: CliPositionalArg[CheckpointPath]
    destination: CliPositionalArg[Path] = Field(
        description="folder to write; with --to gguf, file to write"
    )
    to: Literal["hf", "gguf"] = Field(
        "hf", description="hf is a folder for transformers, gguf a file for llama.cpp"
    )
    dtype: StoredDType = "auto"
    pre: str | None = Field(
        None,
        description="with --to gguf: name of the llama.cpp split pattern to use if llama.cpp does "
        "not have the checkpoint's own pattern",
    )


class HealthSettings(CommandSettings):
    """Settings of `logitd health`."""

    command = "health"
    groups: ClassVar = {"url": "server", "live": "question"}
    needs: ClassVar = dict.fromkeys(("host", "port"), _WITHOUT_URL)

    url: CliPositionalArg[str | None] = Field(
        None, description="address of the server (default: from --host and --port)"
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address that the server binds; 0.0.0.0 is this machine",
    )
    port: int = Field(8000, ge=1, le=65535, description="port that the server binds")
    live: bool = Field(
        False,
        description="ask whether the process needs a restart, instead of whether the server "
        "answers requests",
    )
    timeout: float = Field(2, gt=0, description="maximum time in seconds to wait for the answer")


class BenchSettings(ComputeSettings):
    """Settings of `logitd bench`."""

    command = "bench"
    groups: ClassVar = {
        "checkpoint": "model",
        "device": "computation",
        "kv_cache_dtype": "computation",
        "batches": "load",
    }

    checkpoint: CliPositionalArg[CheckpointPath] = BUNDLED_CHECKPOINT
    kv_cache_dtype: KVCacheCells = "auto"
    batch_code: BatchCode = False
    batches: BatchSizes = (1, 8, 32)
    prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens per prompt (default: 256, or fewer if the model's context is shorter)",
    )
    tokens: int = Field(
        64,
        ge=2,
        description="tokens generated per sequence; streams of a server generate more if that "
        "is needed for all to run at once",
    )
    rounds: int = Field(3, ge=1, le=1000, description="runs of each case, whose median is reported")
    url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]+",
        description="address of a running server of the same checkpoint; its streams are "
        "measured too. Its API key comes from LOGITD_API_KEY",
    )
