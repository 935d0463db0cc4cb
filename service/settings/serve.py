"""Settings of `logitd serve`."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import CliPositionalArg, NoDecode

from logitd.model.inference.engine.config import SERVED_TARGET_GAP, EngineConfig
from logitd.model.inference.options import (
    SERVED_SLOTS,
    Speculation,
    parse_loss_limit,
    parse_memory,
    parse_target_gap,
)
from logitd.service.settings.common import (
    BUNDLED_CHECKPOINT,
    CommandSettings,
    Device,
    DType,
    Kernels,
    KVCacheCells,
    LogFormat,
    LogLevel,
    Quantize,
    Target,
    Threads,
    split_list,
)
from logitd.service.settings.model_source import (
    ModelSource,
    checked_name,
    listed,
    model_source,
    named,
)


def _matches(pattern: str, rule: str) -> AfterValidator:
    """Check that all of a text matches a pattern."""

    def checked(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(rule)
        return text

    return AfterValidator(checked)


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Check a text with its parser, and keep the text."""

    def checked(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(checked)


Origin = Annotated[
    str,
    _matches(
        r"\*|[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+",
        "an origin is *, https://host or https://host:port, in lower case",
    ),
]
PathText = Annotated[
    str,
    _matches(r"/|(/[^\s/?#]+)+", "a path begins with / and does not end with it, except / itself"),
]
Collector = Annotated[
    str,
    _matches(
        r"https?://[^\s/?#@]+(/[^\s?#]*)?",
        "a collector is http://host:port or https://host:port, usually with port 4318; put its "
        "keys into the variable OTEL_EXPORTER_OTLP_HEADERS",
    ),
]
Host = Annotated[
    str,
    _matches(
        r"\S+",
        "an address is a name or a number without white space, such as 127.0.0.1; 0.0.0.0 binds "
        "all interfaces of this machine",
    ),
]
AllowedHosts = Annotated[
    tuple[
        Annotated[
            str,
            _matches(
                r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+",
                "a host is *, a name or an address, without scheme, port and brackets, such as "
                "gpt.example.org",
            ),
        ],
        ...,
    ],
    NoDecode,
    BeforeValidator(split_list),
    Field(
        description="names of this server in the Host header, separated by commas; other requests "
        "get 403. * is any name. Loopback names and --host are always accepted. On a loopback "
        "address without API keys, only they and the names given here are"
    ),
]
MemoryText = Annotated[str, _parsed_by(parse_memory)]
TargetGapText = Annotated[str, _parsed_by(parse_target_gap)]
LossText = Annotated[str, _parsed_by(parse_loss_limit)]
ACCEPTED_LOSS = "2%"
"""Default of --max-quantization-loss, for int8 and for int4."""
Origins = Annotated[
    tuple[Origin, ...],
    NoDecode,
    BeforeValidator(split_list),
    Field(
        description="origins whose pages may read replies in a browser, such as "
        "https://example.org, separated by commas; * is any origin"
    ),
]
PublicPaths = Annotated[
    tuple[PathText, ...],
    NoDecode,
    BeforeValidator(split_list),
    Field(
        description="paths that need no API key, including all below them, separated by commas; "
        "/health never needs one"
    ),
]
ModelSources = Annotated[
    tuple[
        Annotated[ModelSource, PlainValidator(model_source), PlainSerializer(str)],
        ...,
    ],
    NoDecode,
    BeforeValidator(listed),
    Field(min_length=1),
    AfterValidator(named),
]


_HAS_KEYS = (
    lambda given: given.get("api_keys") or given.get("api_key_file"),
    "it limits API keys, and there are none: set --api-key-file or LOGITD_API_KEYS",
)


class ServeSettings(CommandSettings):
    """Settings of `logitd serve`."""

    command = "serve"
    groups: ClassVar = {
        "checkpoint": "model",
        "follow": "reloading",
        "host": "network",
        "device": "computation",
        "slots": "engine",
        "max_queue": "request limits",
        "max_connections": "connection limits",
        "stall_timeout": "shutdown",
        "api_keys": "authentication",
        "log_level": "logs and traces",
    }
    flag_names: ClassVar = {"import_model": "import"}
    needs: ClassVar = {
        "follow_interval": (lambda given: given.get("follow"), "it needs --follow"),
        "max_quantization_loss": (
            lambda given: (given.get("quantize"), given.get("kv_cache_dtype")) != ("none", "auto"),
            "it limits the loss of --quantize and --kv-cache-dtype, and neither is set: set one",
        ),
        "kv_cache_memory": (
            lambda given: given.get("slots") is None,
            "it sets the number of slots, and so does --slots: set only one",
        ),
        "key_per_minute": _HAS_KEYS,
        "key_at_once": _HAS_KEYS,
        "trace_ratio": (
            lambda given: given.get("otlp_endpoint"),
            "it is a share of the traces, which need --otlp-endpoint",
        ),
    }

    checkpoint: CliPositionalArg[ModelSources] = Field(
        (ModelSource(BUNDLED_CHECKPOINT),),
        description="directory of a checkpoint, or of a run, whose best checkpoint is served. "
        "Several are written as NAME=PATH: requests choose one by name, or get the first",
    )
    import_model: bool = Field(
        False,
        description="if CHECKPOINT is a model trained elsewhere (a file of weights or a folder), "
        "import it into checkpoints/ first, unless it is there already",
    )
    served_model_name: Annotated[str, AfterValidator(checked_name)] | None = Field(
        None,
        description="name of the model in requests, replies and metrics; if not given the name of "
        "the checkpoint's folder or of its run. For a single model; the same as NAME=PATH",
    )
    follow: Literal["best", "latest"] | None = Field(
        None,
        description="follow a run while it trains: serve each new best checkpoint by validation "
        "loss, or each new latest one, without a break",
    )
    follow_interval: float = Field(
        2, gt=0, le=86400, description="seconds between two checks of a followed run"
    )
    reload_timeout: float = Field(
        60,
        gt=0,
        description="seconds in which requests of the old checkpoint may finish while a new one "
        "waits to take its place; after them they end with an error",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="key of POST /admin/reload, at least 16 characters; without one it is a 403",
    )
    host: Host = Field("127.0.0.1", description="address to bind; 0.0.0.0 binds all")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 picks a free one")
    allowed_hosts: AllowedHosts = ()
    device: Device = "auto"
    dtype: DType = "auto"
    threads: Threads = 0
    kernels: Kernels = "auto"
    kernel_target: Target = "auto"
    quantize: Quantize = "none"
    kv_cache_dtype: KVCacheCells = "auto"
    validation_text: Path | None = Field(
        None,
        description="UTF-8 text on which the loss of --quantize and --kv-cache-dtype is measured; "
        "if not given the checkpoint's own validation text, if it is found",
    )
    max_quantization_loss: LossText = Field(
        ACCEPTED_LOSS,
        description="largest rise of that text's bits per byte, as a share (2%), or any; above it "
        "the server does not start",
    )
    batch_invariant: bool = Field(
        False,
        description="the same bits for a request in any batch. Always so on a CPU; on CUDA a step "
        "of one or two sequences then takes about twice as long",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="sequences in the KV cache of each model; if not given as many as fit into "
        f"--kv-cache-memory, else into {SERVED_SLOTS.share} of what the weights leave free, "
        f"{SERVED_SLOTS.most} at most, and {EngineConfig().slots} on CUDA with --batch-invariant",
    )
    kv_cache_memory: MemoryText | None = Field(
        None,
        description="memory of the KV cache, instead of --slots: bytes (8GiB), or a share (80%), "
        "which on a GPU is of all its memory, weights and other processes included, and on a CPU "
        "of what the weights leave free. As many slots as fit, at most 4096. Several models share "
        "it equally",
    )
    prefill_chunk: int = Field(
        EngineConfig().prefill_chunk,
        ge=32,
        multiple_of=32,
        description="most prompt positions computed per step",
    )
    target_gap: TargetGapText | None = Field(
        None,
        description="longest step that computes prompts while other sequences decode, whose tokens "
        "wait for it: a multiple of a step that only decodes (4x), a time (150ms), or none, for "
        "the most tokens per second that --prefill-chunk allows. Each step computes at least one "
        f"block of prompts. If not given {SERVED_TARGET_GAP} on a CPU; on CUDA always none",
    )
    prefix_reuse: bool = Field(
        EngineConfig().prefix_reuse, description="copy shared prompt prefixes between slots"
    )
    speculate: Speculation = Field(
        EngineConfig().speculate,
        description="speculative decoding: ngram drafts tokens when a text repeats itself, and "
        "verifies several per step. The same answers, sooner",
    )
    max_queue: int = Field(
        256,
        ge=0,
        description="sequences that may wait for a slot; more get 429, except those of a caller "
        "below its share",
    )
    max_queue_tokens: int = Field(
        2**18, ge=1, description="prompt tokens that may wait for a slot; more get 429"
    )
    max_queue_elements: int = Field(
        2**32,
        ge=1,
        description="output elements (positions times width) of all waiting and running requests; "
        "more get 429",
    )
    max_request_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens that one request may cost: those of its prompts, and more for "
        "interventions, attributions, cells of a sweep and processed logits; above it is a 400. If "
        "not given 2^20, or --max-sequences prompts of the context's length if that is more",
    )
    max_sequences: int = Field(
        64, ge=1, description="most sequences (prompts times n) in one request"
    )
    max_reply_elements: int = Field(
        2**24,
        ge=2**12,
        description="most output elements of one reply in memory: those of hidden states and "
        "attention weights (float16 counts half), and 64 per listed logprob; also the limit of the "
        "arrays of all replies together",
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="most bytes of a request body")
    any_model_name: bool = Field(
        False,
        description="answer requests for other models, such as a client's default, with the one "
        "that is served and named in the reply; without this they get 404",
    )
    constraint_timeout: float = Field(
        5,
        gt=0,
        le=3600,
        description="most seconds of processor time for compiling a regex, schema or grammar",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        description="most connections at once; above it, those that have waited longest for their "
        "clients are closed. If not given what the file descriptors of the process allow, at most "
        "4096",
    )
    slow_sender_timeout: float = Field(
        20,
        gt=0,
        description="most seconds for the headers of a request; its body must arrive at 2 KiB/s on "
        "average over this time",
    )
    slow_reader_timeout: float = Field(
        30,
        gt=0,
        description="most seconds for which a reply is left unread; it must be read at 2 KiB/s on "
        "average over this time, a stream over twice this time",
    )
    keep_alive_timeout: float = Field(
        30, gt=0, description="most seconds between two requests of a connection"
    )
    stall_timeout: float = Field(
        60, gt=0, description="seconds after which an unfinished step makes /health fail"
    )
    drain_grace: float = Field(
        0,
        ge=0,
        description="seconds at shutdown in which /health is 503 and new requests are still "
        "accepted, until a load balancer has noticed",
    )
    drain_timeout: float = Field(
        30, ge=0, description="seconds at shutdown in which running requests may finish"
    )
    api_keys: SecretStr | None = Field(
        None,
        description="API keys, as NAME=KEY,NAME=KEY; each request must have one. Prefer the "
        "environment or --api-key-file: all users of a machine can see its flags",
    )
    api_key_file: Path | None = Field(
        None,
        description="file with an API key per line, as NAME=KEY, optionally with limits of its "
        "own: per-minute=60 at-once=4; # begins a comment line",
    )
    key_per_minute: int = Field(
        0, ge=0, le=1_000_000, description="most POSTs per minute of each API key; 0 is any"
    )
    key_at_once: int = Field(
        0, ge=0, le=1_000_000, description="most requests of each API key at once; 0 is any"
    )
    public_endpoints: PublicPaths = ("/", "/static", "/docs", "/openapi.json", "/version")
    cors_origins: Origins = ()
    log_level: LogLevel = Field("info", description="lowest level of log lines")
    log_format: LogFormat = Field(
        "text", description="form of log lines on standard error: text, or a JSON object each"
    )

    otlp_endpoint: Collector | None = Field(
        None,
        description="OpenTelemetry collector that gets a trace of each request by OTLP over HTTP, "
        "such as http://127.0.0.1:4318; without one there are no traces",
    )
    trace_ratio: float = Field(
        1,
        ge=0,
        le=1,
        description="share of requests that are traced, of those without a decision in their "
        "traceparent",
    )

    @field_validator("admin_key")
    @classmethod
    def _is_hard_to_guess(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[!-~]{16,}", value.get_secret_value()):
            raise ValueError(
                "a key has at least 16 ASCII letters, digits and signs, without blanks; create one "
                "with `openssl rand -hex 24`"
            )
        return value

    @field_validator("served_model_name")
    @classmethod
    def _names_one_model(cls, value: str | None, info: ValidationInfo) -> str | None:
        sources: tuple[ModelSource, ...] = info.data.get("checkpoint", ())
        if value is None or not sources:
            return value
        if len(sources) > 1:
            raise ValueError(
                f"it names a single model, and {len(sources)} are served: write each as NAME=PATH"
            )
        if (name := sources[0].name) is not None:
            raise ValueError(f"the model already has the name {name!r}: give only one")
        return value

    @property
    def models(self) -> tuple[ModelSource, ...]:
        """The models to serve; each of several has a name."""
        if self.served_model_name is None:
            return self.checkpoint
        (source,) = self.checkpoint
        return (replace(source, name=self.served_model_name),)

    @property
    def source(self) -> ModelSource:
        """The only model."""
        (source,) = self.models
        return source

    def of(self, source: ModelSource, **others: Any) -> Self:
        """These settings for one model, with `others` replaced."""
        changed = {"checkpoint": (source,), "served_model_name": None, **others}
        return self.model_copy(update=changed)
