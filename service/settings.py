"""Settings: one model per command gives its flags, environment variables, .env keys and --help.

Command line > `LOGITD_*` environment > `.env` > default. Every default of the command line stands
here or in the trainer's `TrainingConfig`, and nowhere else. Imports neither torch nor fastapi, so
that --help is immediate.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, CliPositionalArg, NoDecode, SettingsConfigDict

from model.inference.engine.api import EngineConfig
from model.training.config import TrainingConfig
from model.training.presets import SaveDType, TrainingDType
from model.transformer.config import DTypeName, KernelChoice, Quantization, Speculation

BUNDLED_CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / "python-small"


def _settings(command: str, shorter: Mapping[str, str] | None = None) -> SettingsConfigDict:
    """How a command's settings are read; `shorter` are second names of flags, which no field of
    Python can have."""
    return SettingsConfigDict(
        env_prefix="LOGITD_",
        env_file=".env",
        extra="ignore",  # .env serves several commands
        cli_prog_name=f"logitd {command}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_show_env_vars=True,
        allow_inf_nan=False,
        frozen=True,
        cli_shortcuts=shorter or {},
    )


def _split(value: Any) -> Any:
    """A list as people write it in a flag or a variable: its items with commas between them."""
    if not isinstance(value, str):
        return value
    return [item.strip() for item in value.split(",")] if value.strip() else []


def _origin(text: str) -> str:
    if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+", text):
        raise ValueError(
            "an origin is * or written as https://host or https://host:port, in small letters"
        )
    return text


def _path(text: str) -> str:
    if not re.fullmatch(r"/|(/[^\s/?#]+)+", text):
        raise ValueError("a path begins with / and does not end with it, except / itself")
    return text


def _distinct(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(sizes)) < len(sizes):
        raise ValueError("a size is there twice")
    return sizes


LogLevel = Literal["debug", "info", "warning", "error"]

CheckpointPath = Annotated[
    Path, Field(description="checkpoint directory: one that `logitd train` or `import` wrote")
]
Device = Annotated[
    str, Field(description="auto, cpu, cuda or cuda:N; auto is CUDA if there is one")
]
DType = Annotated[
    DTypeName,
    Field(
        description="numbers to compute in; auto is bfloat16 on CUDA, and on a CPU that multiplies "
        "it where decoding is native, else float32"
    ),
]
StoredDType = Annotated[
    DTypeName, Field(description="numbers to store weights in; auto is those of the source")
]
Kernels = Annotated[
    KernelChoice,
    Field(
        description="how decode steps are computed on a CPU: native is built for this processor, "
        "torch needs no compiler; auto is native where it can be had"
    ),
]
Quantize = Annotated[
    Quantization,
    Field(description="int8 rounds the matrices to 8 bits when loading"),
]
Threads = Annotated[
    int, Field(ge=0, le=1024, description="compute threads; 0 is one per available processor")
]
AsJson = Annotated[bool, Field(description="print JSON instead of tables")]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_origin)], ...],
    NoDecode,
    BeforeValidator(_split),
    Field(
        description="origins, such as https://example.org, whose pages may read replies in a "
        "browser, with commas between them; * is any"
    ),
]
PublicPaths = Annotated[
    tuple[Annotated[str, AfterValidator(_path)], ...],
    NoDecode,
    BeforeValidator(_split),
    Field(
        description="paths that answer without an API key, with what is below them and commas "
        "between them; /health always does"
    ),
]
BatchSizes = Annotated[
    tuple[Annotated[int, Field(ge=1, le=4096)], ...],
    NoDecode,
    BeforeValidator(_split),
    AfterValidator(_distinct),
    Field(min_length=1, description="how many sequences decode together, with commas between them"),
]


class ServeSettings(BaseSettings):
    """Serve a checkpoint over HTTP."""

    model_config = _settings("serve")

    checkpoint: CheckpointPath = BUNDLED_CHECKPOINT
    host: str = Field("127.0.0.1", description="address to bind; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 picks a free one")
    device: Device = "auto"
    dtype: DType = "auto"
    threads: Threads = 0
    kernels: Kernels = "auto"
    quantize: Quantize = "none"
    validation_text: Path | None = Field(
        None,
        description="UTF-8 text on which it is measured what --quantize costs; without one the "
        "checkpoint's own validation text, where it can be found",
    )
    batch_invariant: bool = Field(
        False,
        description="the same bits for a request in any company: on a CPU that is always so, on "
        "CUDA every step then takes the time of the largest",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description=f"sequences in the KV cache at once; if not given {EngineConfig().slots}, or "
        "what the next two make of memory",
    )
    kv_cache_bytes: int | None = Field(
        None, ge=1, description="keys and values at most: as many slots as fit, up to 4096"
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a GPU's memory to use, weights and what others hold included: as "
        "many slots as fit, up to 4096",
    )
    prefill_chunk: int = Field(
        EngineConfig().prefill_chunk,
        ge=32,
        multiple_of=32,
        description="prompt positions computed per step at most",
    )
    prefix_reuse: bool = Field(
        EngineConfig().prefix_reuse, description="copy shared prompt prefixes between slots"
    )
    speculate: Speculation = Field(
        EngineConfig().speculate,
        description="ngram guesses tokens where a text repeats itself and verifies several in one "
        "step: the same answers, sooner",
    )
    engine: Literal["thread", "process"] = Field(
        "thread",
        description="where the engine runs: in a thread of the server, or in a process of its own, "
        "which pays where steps are so short that writing tokens holds them up",
    )
    max_queue: int = Field(
        256, ge=0, description="sequences that may wait for a slot; more are answered 429"
    )
    max_queue_tokens: int = Field(
        2**18, ge=1, description="prompt tokens that may wait for a slot; more are answered 429"
    )
    max_queue_numbers: int = Field(
        2**32,
        ge=1,
        description="numbers (positions times what is computed at each) of rows asked for and of "
        "given tokens scored, in all requests that wait or run; more are answered 429",
    )
    max_sequences: int = Field(
        64, ge=1, description="sequences (prompts times n) in one request at most"
    )
    max_logprobs: int = Field(
        2**18,
        ge=1,
        description="logprobs in one reply at most: generated tokens times (1 + logprobs), "
        "or prompts times listed tokens",
    )
    max_reply_bytes: int = Field(
        64 * 2**20,
        ge=2**16,
        description="hidden states and attention weights in one reply at most, and those that all "
        "replies may hold together",
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="request body at most")
    constraint_timeout: float = Field(
        5, gt=0, le=3600, description="seconds that compiling a regex, schema or grammar may take"
    )
    slow_reader_timeout: float = Field(
        30, gt=0, description="seconds a client may leave a stream unread before it is aborted"
    )
    stall_timeout: float = Field(
        60, gt=0, description="seconds after which a step that does not end makes /health fail"
    )
    drain_timeout: float = Field(
        30, ge=0, description="seconds that running requests get to finish at shutdown"
    )
    api_keys: SecretStr | None = Field(
        None,
        description="keys of which a request must send one, as NAME=KEY,NAME=KEY; better set by "
        "environment or --api-key-file, because every user of a machine can see its flags",
    )
    api_key_file: Path | None = Field(
        None, description="file of such keys, a NAME=KEY on each line; # begins a comment line"
    )
    public_endpoints: PublicPaths = ("/", "/static", "/docs", "/openapi.json", "/version")
    cors_origins: Origins = ()
    log_level: LogLevel = Field("info", description="least severe log lines to print")

    @field_validator("kv_cache_bytes", "gpu_memory_utilization")
    @classmethod
    def _one_word_on_slots(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None:
            for other in ("slots", "kv_cache_bytes"):
                if info.data.get(other) is not None:
                    raise ValueError(f"it says how many slots there are, and so does {other}")
        return value


class TrainSettings(BaseSettings, TrainingConfig):
    """Train a GPT on text; without --data on the text that every Python carries."""

    model_config = _settings("train", {"from-checkpoint": "from"})


class EvalSettings(BaseSettings):
    """Measure the loss of a checkpoint on a text: per token, as perplexity and in bits per byte."""

    model_config = _settings("eval", {"as-json": "json"})

    checkpoint: CliPositionalArg[Path] = Field(BUNDLED_CHECKPOINT, description="directory")
    data: tuple[str, ...] = Field(
        (),
        description="text to measure on, all of it: files, folders and globs; without any, what "
        "the checkpoint's own training held out, where that can be found",
    )
    stride: int | None = Field(
        None,
        ge=1,
        description="tokens that each window counts; the rest of it is what they are predicted "
        "from (default: the whole window, as in training)",
    )
    batch_size: int = Field(8, ge=1, le=4096, description="windows in a forward pass")
    device: Device = "auto"
    dtype: TrainingDType = Field(
        "auto",
        description="numbers to compute in, as in training; auto is bfloat16 where the device "
        "multiplies it",
    )
    threads: Threads = 0
    quantize: Quantization = Field(
        "none", description="int8 measures weights rounded to 8 bits, by decode steps: slower"
    )
    as_json: AsJson = False


class MergeSettings(BaseSettings):
    """Make a checkpoint of an adapter and of the checkpoint that it was trained on."""

    model_config = _settings("merge")

    base: CliPositionalArg[Path] = Field(description="checkpoint that the adapter was trained on")
    adapter: CliPositionalArg[Path] = Field(
        description="adapter directory: one that `logitd train --lora` wrote"
    )
    dest: CliPositionalArg[Path] = Field(description="checkpoint directory to write")
    save_dtype: SaveDType = Field("float32", description="numbers of the checkpoint's weights")


class GenerateSettings(BaseSettings):
    """Generate text from a checkpoint in the terminal, without a server."""

    model_config = _settings("generate")

    prompt: CliPositionalArg[str] = Field(description="text to continue")
    checkpoint: CheckpointPath = BUNDLED_CHECKPOINT
    max_tokens: int = Field(200, ge=1, description="tokens to generate at most")
    temperature: float = Field(0.8, ge=0, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="draw from the k likeliest tokens; 0 is all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest that make up p")
    seed: int | None = Field(None, ge=0, lt=2**64, description="same seed, same text")
    n: int = Field(1, ge=1, le=64, description="completions")
    device: Device = "auto"
    dtype: DType = "auto"
    threads: Threads = 0
    kernels: Kernels = "auto"
    quantize: Quantize = "none"


class InspectSettings(BaseSettings):
    """Show a checkpoint and the shapes of its forward pass, or how training runs went."""

    model_config = _settings("inspect", {"as-json": "json"})

    paths: CliPositionalArg[tuple[Path, ...]] = Field(
        (BUNDLED_CHECKPOINT,), description="a checkpoint, a run directory, or several of these"
    )
    text: str = Field("def main():", description="text to run through the model of a checkpoint")
    as_json: AsJson = False


class ImportSettings(BaseSettings):
    """Make a checkpoint of a model trained elsewhere: nanoGPT, Hugging Face or LitGPT."""

    model_config = _settings("import")

    source: CliPositionalArg[Path] = Field(
        description="nanoGPT's ckpt.pt, or a folder of Hugging Face, LitGPT or nanoGPT"
    )
    destination: CliPositionalArg[Path] = Field(description="checkpoint directory to write")
    tokenizer: str | None = Field(
        None,
        description="vocabulary, if the source has none or another one is right: gpt2, "
        "cl100k_base, o200k_base, a ranks file, nanoGPT's meta.pkl or a tokenizer.json",
    )
    dtype: StoredDType = "auto"
    context_length: int | None = Field(
        None, ge=1, description="positions to keep; if not given all that the source has"
    )
    skip_normalizer: bool = Field(
        False,
        description="import a tokenizer that changes texts first, without that: texts that it "
        "would change get other ids than in the source",
    )


class ExportSettings(BaseSettings):
    """Write a checkpoint in a format that other programs read: Hugging Face's or llama.cpp's."""

    model_config = _settings("export")

    checkpoint: CliPositionalArg[Path] = Field(description="checkpoint directory")
    destination: CliPositionalArg[Path] = Field(
        description="folder to write, or file of the format gguf"
    )
    to: Literal["hf", "gguf"] = Field(
        "hf", description="hf is a folder for transformers, gguf a file for llama.cpp"
    )
    dtype: StoredDType = "auto"
    pre: str | None = Field(
        None,
        description="for gguf: llama.cpp's name of the way to cut texts, where it has none that "
        "is this checkpoint's",
    )


class BenchSettings(BaseSettings):
    """Measure how fast a checkpoint runs, in process and over HTTP, and what the machine allows."""

    model_config = _settings("bench")

    checkpoint: CheckpointPath = BUNDLED_CHECKPOINT
    device: Device = "auto"
    dtype: DType = "auto"
    threads: Threads = 0
    kernels: Kernels = "auto"
    quantize: Quantize = "none"
    batches: BatchSizes = (1, 8, 32)
    prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of each prompt; if not given 256, or what the model's context leaves",
    )
    tokens: int = Field(64, ge=2, description="tokens that each sequence generates")
    rounds: int = Field(
        3, ge=1, le=1000, description="runs of each case, of which the median counts"
    )
    skip_http: bool = Field(False, description="measure in process alone")
    profile: bool = Field(
        False,
        description="instead of rates, where the time of a decode step and of a prompt goes, stage "
        "by stage, decoding natively and in plain torch; in process, on a CPU",
    )
    url: str | None = Field(
        None,
        description="load a server that runs already instead of starting one; its API key, if it "
        "wants one, comes from LOGITD_API_KEY",
    )
