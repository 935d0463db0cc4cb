"""Settings of `logitd generate`, `inspect`, `export` and `bench`."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import CliPositionalArg, NoDecode

from logitd.service.settings.common import (
    BUNDLED_CHECKPOINT,
    AsJson,
    CheckpointPath,
    CommandSettings,
    Device,
    DType,
    Kernels,
    KVCacheCells,
    Quantize,
    StoredDType,
    Target,
    Threads,
    split_list,
)


def _distinct(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(sizes)) < len(sizes):
        raise ValueError("a size occurs twice: give each once")
    return sizes


BatchSizes = Annotated[
    tuple[Annotated[int, Field(ge=1, le=4096)], ...],
    NoDecode,
    BeforeValidator(split_list),
    AfterValidator(_distinct),
    Field(
        min_length=1,
        description="numbers of sequences that decode together, separated by commas",
    ),
]


_NOT_GREEDY = (
    lambda given: given.get("temperature") != 0,
    "it has no effect with temperature 0, which is greedy: give only one of them",
)
_WITHOUT_URL = (
    lambda given: given.get("url") is None,
    "the address of the server has it already: give the address, or --host and --port",
)


class GenerateSettings(CommandSettings):
    """Settings of `logitd generate`."""

    command = "generate"
    groups: ClassVar = {"prompt": "text", "device": "computation"}
    needs: ClassVar = dict.fromkeys(("top_k", "top_p", "seed"), _NOT_GREEDY)

    prompt: CliPositionalArg[str] = Field(
        description='text to continue; token ids, "0 1 2", for a model without a vocabulary'
    )
    checkpoint: CheckpointPath = BUNDLED_CHECKPOINT
    max_tokens: int = Field(200, ge=1, description="most tokens to generate")
    temperature: float = Field(0.8, ge=0, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="sample from the k likeliest tokens; 0 is all")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the likeliest tokens with probability p together"
    )
    seed: int = Field(-1, ge=-1, lt=2**64, description="same seed, same text; -1 is a random one")
    n: int = Field(1, ge=1, le=64, description="number of completions")
    device: Device = "auto"
    dtype: DType = "auto"
    threads: Threads = 0
    kernels: Kernels = "auto"
    kernel_target: Target = "auto"
    quantize: Quantize = "none"


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
        description="text to run through a checkpoint, or the best one of a run; token ids, by "
        'default "0 1 2", for a model without a vocabulary',
    )
    as_json: AsJson = False


class ExportSettings(CommandSettings):
    """Settings of `logitd export`."""

    command = "export"
    groups: ClassVar = {"checkpoint": "input and output"}
    needs: ClassVar = {
        "pre": (
            lambda given: given.get("to") == "gguf",
            "it names a split pattern of GGUF files: add --to gguf",
        ),
    }

    checkpoint: CliPositionalArg[CheckpointPath]
    destination: CliPositionalArg[Path] = Field(
        description="folder to write, or file with --to gguf"
    )
    to: Literal["hf", "gguf"] = Field(
        "hf", description="hf is a folder for transformers, gguf a file for llama.cpp"
    )
    dtype: StoredDType = "auto"
    pre: str | None = Field(
        None,
        description="for gguf: name of a llama.cpp split pattern, if llama.cpp has none for the "
        "checkpoint's own",
    )


class HealthSettings(CommandSettings):
    """Settings of `logitd health`."""

    command = "health"
    groups: ClassVar = {"url": "server", "live": "question"}
    needs: ClassVar = dict.fromkeys(("host", "port"), _WITHOUT_URL)

    url: CliPositionalArg[str | None] = Field(
        None, description="address of the server; if not given that of --host and --port"
    )
    host: str = Field(
        "127.0.0.1", min_length=1, description="address it binds; 0.0.0.0 is this machine"
    )
    port: int = Field(8000, ge=1, le=65535, description="port it binds")
    live: bool = Field(
        False, description="ask if the server needs a restart, instead of if it answers requests"
    )
    timeout: float = Field(2, gt=0, description="most seconds to wait for the answer")


class BenchSettings(CommandSettings):
    """Settings of `logitd bench`."""

    command = "bench"
    groups: ClassVar = {"checkpoint": "model", "device": "computation", "batches": "load"}

    checkpoint: CliPositionalArg[CheckpointPath] = BUNDLED_CHECKPOINT
    device: Device = "auto"
    dtype: DType = "auto"
    threads: Threads = 0
    kernels: Kernels = "auto"
    kernel_target: Target = "auto"
    quantize: Quantize = "none"
    kv_cache_dtype: KVCacheCells = "auto"
    batches: BatchSizes = (1, 8, 32)
    prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens per prompt; if not given 256, or what the model's context leaves",
    )
    tokens: int = Field(
        64,
        ge=2,
        description="tokens that each sequence generates; streams of a server generate more if "
        "that is needed for all of them to run at once",
    )
    rounds: int = Field(
        3, ge=1, le=1000, description="runs of each case; the result is their median"
    )
    url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]+",
        description="address of a running server of the same checkpoint whose streams are measured "
        "too; its API key comes from LOGITD_API_KEY",
    )
