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
    """Check a text by what reads it later."""

    def checked(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(checked)


def _default_slots() -> str:
    most, share = SERVED_SLOTS.most, SERVED_SLOTS.share
    return (
        f"into {share} of what the weights leave free, {most} at most; {EngineConfig().slots} on "
        "CUDA with --batch-invariant"
    )


Origin = Annotated[
    str,
    _matches(
        r"\*|[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+",
        "an origin is * or written as https://host or https://host:port, in lower case",
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
        "a collector is http://host:port or https://host:port, where 4318 is the usual port; "
        "keys for it belong into the variable OTEL_EXPORTER_OTLP_HEADERS",
    ),
]
Host = Annotated[
    str,
    _matches(
        r"\S+",
        "an address is a name or a number without white space, such as 127.0.0.1; 0.0.0.0 is every "
        "interface of this machine",
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
        description="names by which clients reach the server, separated by commas: a request whose "
        "Host is another is answered 403; * is any. Those of the loopback and --host always are "
        "accepted. Without API keys on a loopback address no other is, unless it is given here"
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
        description="origins, such as https://example.org, whose pages may read replies in a "
        "browser, separated by commas; * is any"
    ),
]
PublicPaths = Annotated[
    tuple[PathText, ...],
    NoDecode,
    BeforeValidator(split_list),
    Field(
        description="paths that answer without an API key, and everything below them, separated "
        "by commas; /health always does"
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
    "it limits each API key, and there are none: set api-key-file or LOGITD_API_KEYS",
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
            "it bounds the cost of --quantize and --kv-cache-dtype, and nothing is quantized: give "
            "one of them too",
        ),
        "kv_cache_memory": (
            lambda given: given.get("slots") is None,
            "it sets the number of slots, and so does --slots: give one",
        ),
        "key_per_minute": _HAS_KEYS,
        "key_at_once": _HAS_KEYS,
        "trace_ratio": (
            lambda given: given.get("otlp_endpoint"),
            "it is a share of the traces, which need otlp-endpoint",
        ),
    }

    checkpoint: CliPositionalArg[ModelSources] = Field(
        (ModelSource(BUNDLED_CHECKPOINT),),
        description="checkpoint directory, or a run's, of which the best checkpoint is served; or "
        "several, as NAME=PATH each: requests choose one by its name, and the first is the one of "
        "those that name none",
    )
    import_model: bool = Field(
        False,
        description="where the checkpoint is somebody else's file of weights or folder, import it "
        "into checkpoints/ first, unless that was done before",
    )
    served_model_name: Annotated[str, AfterValidator(checked_name)] | None = Field(
        None,
        description="what replies and metrics call the model, and requests may; if not given the "
        "name of the checkpoint's folder, or of its run. The same as NAME=PATH, and for one model "
        "alone",
    )
    follow: Literal["best", "latest"] | None = Field(
        None,
        description="serve what a run saves while it goes on: its best checkpoint by validation "
        "loss, or the latest, put in place of the one before without a break",
    )
    follow_interval: float = Field(
        2, gt=0, le=86400, description="seconds between two looks at a run that is followed"
    )
    reload_timeout: float = Field(
        60,
        gt=0,
        description="seconds that requests of the checkpoint before get to finish when another "
        "takes its place, while new ones wait; what is left then is ended with an error",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="key of POST /admin/reload, at least 16 characters; without one it answers 403",
    )
    host: Host = Field("127.0.0.1", description="address to bind; 0.0.0.0 for all")
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
        description="UTF-8 text to measure the loss of --quantize and --kv-cache-dtype on; if not "
        "given the checkpoint's own validation text, where it can be found",
    )
    max_quantization_loss: LossText = Field(
        ACCEPTED_LOSS,
        description="the most that both may add to the bits per byte of that text: with more the "
        "server does not start; any accepts everything",
    )
    batch_invariant: bool = Field(
        False,
        description="batch invariance: the same bits for a request whatever else is in the batch. "
        "Always so on a CPU; on CUDA every step then takes as long as the largest",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="sequences in the KV cache at once, of each model where several are served; if "
        f"not given as many as fit into --kv-cache-memory, or without it {_default_slots()}",
    )
    kv_cache_memory: MemoryText | None = Field(
        None,
        description="memory of the KV cache, instead of a number of slots: bytes (8GiB), or a "
        "share (80%): of a GPU's memory, weights and other processes included, or of what the "
        "weights leave free on a CPU. As many slots as fit, up to 4096. Where several models are "
        "served it is that of all together, and each has an equal part",
    )
    prefill_chunk: int = Field(
        EngineConfig().prefill_chunk,
        ge=32,
        multiple_of=32,
        description="prompt positions computed per step at most",
    )
    target_gap: TargetGapText | None = Field(
        None,
        description="how long a step should take at most that computes prompts while others "
        "decode, because their tokens wait for it: so many times a step that decodes alone (4x), a "
        "time (150ms), or none for as much as --prefill-chunk allows, which is the most tokens a "
        f"second. A block of prompts is computed in any case. If not given {SERVED_TARGET_GAP} on "
        "a CPU; on CUDA none, and nothing else is possible",
    )
    prefix_reuse: bool = Field(
        EngineConfig().prefix_reuse, description="copy shared prompt prefixes between slots"
    )
    speculate: Speculation = Field(
        EngineConfig().speculate,
        description="speculative decoding: ngram drafts tokens where a text repeats itself and "
        "verifies several in one step. The answers are the same, and come sooner",
    )
    max_queue: int = Field(
        256,
        ge=0,
        description="sequences that may wait for a slot; more are answered 429, "
        "unless they are of a caller that has less than its share",
    )
    max_queue_tokens: int = Field(
        2**18, ge=1, description="prompt tokens that may wait for a slot; more are answered 429"
    )
    max_queue_elements: int = Field(
        2**32,
        ge=1,
        description="output elements (positions times width) of all requests that wait or run; "
        "more are answered 429",
    )
    max_request_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens that one request may cost at most: those of its prompts, more for "
        "interventions, attributions, the cells of a sweep and processed logits; more are answered "
        "400. If not given 2^20, or --max-sequences prompts as long as the context if that is more",
    )
    max_sequences: int = Field(
        64, ge=1, description="sequences (prompts times n) in one request at most"
    )
    max_reply_elements: int = Field(
        2**24,
        ge=2**12,
        description="output elements that one reply may hold in memory at most: those of hidden "
        "states and attention weights (float16 counts half), and 64 for each logprob it lists; "
        "also the limit of the arrays that all replies hold together",
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="request body at most")
    any_model_name: bool = Field(
        False,
        description="answer a request that names another model, such as a client's default, with "
        "the one that is served, whose name its reply says; without this it is a 404",
    )
    constraint_timeout: float = Field(
        5,
        gt=0,
        le=3600,
        description="seconds of processor time that compiling a regex, schema or grammar may take",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        description="connections at once; with more, those that wait longest for their clients "
        "are closed. If not given as many as the process has file descriptors for, up to 4096",
    )
    slow_sender_timeout: float = Field(
        20,
        gt=0,
        description="seconds a client may take for the headers of a request; its body has to come "
        "with 2 KiB/s on average over this time",
    )
    slow_reader_timeout: float = Field(
        30,
        gt=0,
        description="seconds a client may leave a reply unread before it is aborted; it has to be "
        "read with 2 KiB/s on average over this time, a stream over twice this time",
    )
    keep_alive_timeout: float = Field(
        30, gt=0, description="seconds a connection may be idle between two requests"
    )
    stall_timeout: float = Field(
        60, gt=0, description="seconds after which a step that does not end makes /health fail"
    )
    drain_grace: float = Field(
        0,
        ge=0,
        description="seconds at shutdown in which /health is 503 and new requests are still "
        "answered: as long as a balancer takes to notice",
    )
    drain_timeout: float = Field(
        30, ge=0, description="seconds that running requests get to finish at shutdown"
    )
    api_keys: SecretStr | None = Field(
        None,
        description="API keys, as NAME=KEY,NAME=KEY; a request must send one of them. Better set "
        "by environment or --api-key-file, because every user of a machine can see its flags",
    )
    api_key_file: Path | None = Field(
        None,
        description="file of API keys, one NAME=KEY on each line, and behind it limits of its own "
        "where it has some: per-minute=60 at-once=4; # begins a comment line",
    )
    key_per_minute: int = Field(
        0, ge=0, le=1_000_000, description="requests that each API key may post a minute; 0 is any"
    )
    key_at_once: int = Field(
        0, ge=0, le=1_000_000, description="requests of each API key answered at once; 0 is any"
    )
    public_endpoints: PublicPaths = ("/", "/static", "/docs", "/openapi.json", "/version")
    cors_origins: Origins = ()
    log_level: LogLevel = Field("info", description="least severe log lines to print")
    log_format: LogFormat = Field(
        "text", description="of log lines on standard error: text, or a JSON object each"
    )

    otlp_endpoint: Collector | None = Field(
        None,
        description="send a trace of each request to the OpenTelemetry collector at this address, "
        "such as http://127.0.0.1:4318, by OTLP over HTTP; without one there are no traces",
    )
    trace_ratio: float = Field(
        1,
        ge=0,
        le=1,
        description="share of the requests that are traced, of those whose traceparent does not "
        "say whether they are",
    )

    @field_validator("admin_key")
    @classmethod
    def _is_hard_to_guess(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[!-~]{16,}", value.get_secret_value()):
            raise ValueError(
                "a key has at least 16 ASCII letters, digits and signs, without blanks; "
                "`openssl rand -hex 24` makes a good one"
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
                f"it names one model, and {len(sources)} are served: name each as NAME=PATH"
            )
        if (name := sources[0].name) is not None:
            raise ValueError(f"the model has a name already, {name!r}: give one")
        return value

    @property
    def models(self) -> tuple[ModelSource, ...]:
        """The models that are served; each of several has a name."""
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
        """These settings for one model, with some `others` replaced."""
        changed = {"checkpoint": (source,), "served_model_name": None, **others}
        return self.model_copy(update=changed)
