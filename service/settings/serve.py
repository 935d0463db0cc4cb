"""Settings of `logitd serve`."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import CliPositionalArg

from logitd.model.inference.engine.config import SERVED_TARGET_GAP, SERVED_TARGET_TTFT, EngineConfig
from logitd.model.inference.options import CODE_SLOTS, SERVED_SLOTS, Speculation
from logitd.service.settings.common import (
    BUNDLED_CHECKPOINT,
    WITH_CODE,
    BatchCode,
    CodeCall,
    ComputeSettings,
    KVCacheCells,
    Vocabulary,
)
from logitd.service.settings.model_source import ModelSource, checked_name
from logitd.service.settings.serve_types import (
    AllowedHosts,
    AutoencoderSources,
    Collector,
    Host,
    LossText,
    MemoryText,
    ModelSources,
    Origins,
    PublicPaths,
    TargetGapText,
    TargetTTFTText,
)

ACCEPTED_LOSS = "2%"
"""Default of --max-quantization-loss, the same for int8 and int4."""
HISTORY_SLOTS = 4
"""Number of slots for each step of a history."""
_HAS_KEYS = (
    lambda given: given.get("api_keys") or given.get("api_key_file"),
    "it is a limit of each API key, but the server has no API keys: set --api-key-file or "
    "LOGITD_API_KEYS",
)
_NO_HISTORY = (
    "a history is served unquantized, because the loss of --quantize and --kv-cache-dtype would be "
    "measured for each step: leave out --history, or both of them"
)


class ServeSettings(ComputeSettings):
    """Settings of `logitd serve`."""

    command = "serve"
    groups: ClassVar = {
        "checkpoint": "model",
        "follow": "reloading",
        "host": "network",
        "device": "computation",
        "kv_cache_dtype": "computation",
        "slots": "engine",
        "max_queue": "request limits",
        "max_connections": "connection limits",
        "stall_timeout": "shutdown",
        "api_keys": "authentication",
        "log_level": "logs and traces",
    }
    flag_names: ClassVar = {"import_model": "import"}
    needs: ClassVar = {
        "sae": (
            lambda given: len(given.get("checkpoint", ())) == 1,
            "an autoencoder belongs to one model, but several models are served: serve one",
        ),
        "code_call": WITH_CODE,
        "tokenizer": (
            lambda given: given.get("import_model") or given.get("code"),
            "it names the vocabulary of a model that is imported first: add --import or --code",
        ),
        "follow_interval": (
            lambda given: given.get("follow"),
            "it is the interval between checks of a followed run: add --follow",
        ),
        "history": (lambda given: given.get("quantize") == "none", _NO_HISTORY),
        "kv_cache_dtype": (lambda given: not given.get("history"), _NO_HISTORY),
        "history_steps": (
            lambda given: given.get("history"),
            "it is the number of steps of a history in memory: add --history",
        ),
        "max_quantization_loss": (
            lambda given: (given.get("quantize"), given.get("kv_cache_dtype")) != ("none", "auto"),
            "it limits the loss that --quantize and --kv-cache-dtype cause, but neither is set: "
            "set one of them",
        ),
        "kv_cache_memory": (
            lambda given: given.get("slots") is None,
            "it determines the number of slots, as --slots does: set only one of the two",
        ),
        "key_per_minute": _HAS_KEYS,
        "key_at_once": _HAS_KEYS,
        "trace_ratio": (
            lambda given: given.get("otlp_endpoint"),
            "it is the share of requests that are traced, but there are no traces: set "
            "--otlp-endpoint",
        ),
    }

    checkpoint: CliPositionalArg[ModelSources] = Field(
        (ModelSource(BUNDLED_CHECKPOINT),),
        description="directory of a checkpoint, or of a run, whose best checkpoint is served. "
        "Several models are written as NAME=PATH: a request chooses one by name, or gets the first",
    )
    import_model: bool = Field(
        False,
        description="if CHECKPOINT is a model trained elsewhere (a file of weights or a "
        "folder), first import the model into checkpoints/, unless it is already "
        "there",
    )
    code: str | None = Field(
        None,
        description="for a model trained elsewhere: its own code, FILE.py:NAME, as for `logitd "
        "import`, which runs first. With --run-code the code computes the model",
    )
    code_call: CodeCall = None
    tokenizer: Vocabulary = None
    served_model_name: Annotated[str, AfterValidator(checked_name)] | None = Field(
        None,
        description="name of the model in requests, replies and metrics (default: the name of the "
        "checkpoint's folder or run). For a single model; the same as NAME=PATH",
    )
    sae: AutoencoderSources = Field(
        (),
        description="directory of a sparse autoencoder of the model, as NAME=DIR: its features are "
        "a stage named STAGE.sae.NAME. `logitd sae train` makes one; SAELens' standard, topk and "
        "jumprelu are read too",
    )
    follow: Literal["best", "latest"] | None = Field(
        None,
        description="follow a run while it trains: serve each new checkpoint with the best "
        "validation loss, or each latest checkpoint, without interruption",
    )
    follow_interval: float = Field(
        2, gt=0, le=86400, description="seconds between two checks of a followed run"
    )
    history: bool = Field(
        False,
        description="also serve the steps kept by `logitd train --keep-every`: the field `step` "
        "of a request chooses one, GET /history lists them",
    )
    history_steps: int = Field(
        4,
        ge=1,
        le=256,
        description="steps of the history whose weights are in memory at once, the most recently "
        f"used ones, with {HISTORY_SLOTS} slots each",
    )
    reload_timeout: float = Field(
        60,
        gt=0,
        description="seconds that requests to the old checkpoint have to finish once a new "
        "checkpoint is ready to replace it; requests that take longer end with an "
        "error",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="key of POST /admin/reload, at least 16 characters; without a key that "
        "endpoint replies 403",
    )
    host: Host = Field("127.0.0.1", description="address to bind; 0.0.0.0 binds all")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 picks a free one")
    allowed_hosts: AllowedHosts = ()
    kv_cache_dtype: KVCacheCells = "auto"
    batch_code: BatchCode = False
    validation_text: Path | None = Field(
        None,
        description="UTF-8 text on which the loss of --quantize and --kv-cache-dtype is "
        "measured (default: the checkpoint's validation text, if found)",
    )
    max_quantization_loss: LossText = Field(
        ACCEPTED_LOSS,
        description="largest accepted increase of the bits per byte of --validation-text, in "
        "percent (2%), or any; above it, the server does not start",
    )
    batch_invariant: bool = Field(
        False,
        description="compute the same bits for a request in any batch. A CPU always does so; on "
        "CUDA a step of one or two sequences then takes about twice as long",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="sequences in the KV cache of each model (default: as many as fit into "
        "--kv-cache-memory; without that flag as many as fit into "
        f"{SERVED_SLOTS.share} of the memory that the weights leave free, at most "
        f"{SERVED_SLOTS.most}, {CODE_SLOTS} for a model by its owner's code, and "
        f"{EngineConfig().slots} on CUDA with --batch-invariant)",
    )
    kv_cache_memory: MemoryText | None = Field(
        None,
        description="memory of the KV cache, instead of --slots: bytes (8GiB), or a share "
        "(80%). On a GPU the share is of all its memory, including weights and "
        "other processes; on a CPU it is of the memory that the weights leave "
        "free. The cache has as many slots as fit, at most 4096. Several models "
        "share the memory equally",
    )
    prefill_chunk: int = Field(
        EngineConfig().prefill_chunk,
        ge=32,
        multiple_of=32,
        description="maximum number of prompt positions computed per step",
    )
    target_gap: TargetGapText | None = Field(
        None,
        description="longest step that computes prompts while other sequences decode, because "
        "their next tokens wait for the step: a multiple of a step that only decodes (3x), a time "
        "(150ms), or none, for the most tokens per second that --prefill-chunk allows. Each step "
        f"computes at least one block of prompts. The default is {SERVED_TARGET_GAP} on a CPU; on "
        "CUDA it is always none",
    )
    target_ttft: TargetTTFTText | None = Field(
        None,
        description="time in which first tokens should arrive, in addition to the time of their "
        "own prompts: a time (500ms) or none. If prompts wait longer, steps with prompts take up "
        "to three times --target-gap, or more if more sequences wait than decode. The default is "
        f"{SERVED_TARGET_TTFT:g}s; needs --target-gap",
    )
    prefix_reuse: bool = Field(
        EngineConfig().prefix_reuse, description="copy shared prompt prefixes between slots"
    )
    speculate: Speculation = Field(
        EngineConfig().speculate,
        description="speculative decoding: ngram drafts tokens when a text repeats itself, and "
        "verifies several per step. The answers are the same, and arrive sooner",
    )
    max_queue: int = Field(
        256,
        ge=0,
        description="maximum number of sequences waiting for a slot; above it, requests get "
        "429, except those of a caller below its share",
    )
    max_queue_tokens: int = Field(
        2**18,
        ge=1,
        description="maximum cost in tokens of the sequences waiting for a slot; above it, "
        "requests get 429",
    )
    max_queue_elements: int = Field(
        2**32,
        ge=1,
        description="maximum number of output elements (positions times width) of all waiting "
        "and running requests together; above it, requests get 429",
    )
    max_request_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum cost of one request in tokens: its prompt tokens, and more for "
        "interventions, attributions, cells of a sweep and processed logits; above "
        "it, the request gets 400 (default: 2^20, or --max-sequences prompts of "
        "the context's length if that is more)",
    )
    max_sequences: int = Field(
        64, ge=1, description="maximum number of sequences (prompts times n) in one request"
    )
    max_reply_elements: int = Field(
        2**24,
        ge=2**12,
        description="maximum number of output elements of one reply in memory: the elements of "
        "hidden states and attention weights (an element in float16 counts half), and 64 "
        "per listed logprob; all replies together have the same limit for their "
        "arrays",
    )
    max_body_bytes: int = Field(
        4 * 2**20, ge=1024, description="maximum size of a request body in bytes"
    )
    any_model_name: bool = Field(
        False,
        description="answer requests for unknown models, such as a client's default, with the "
        "first model, which the reply names; without this flag they get 404",
    )
    constraint_timeout: float = Field(
        5,
        gt=0,
        le=3600,
        description="maximum processor time in seconds for compiling one regex, schema or grammar",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        description="maximum number of connections; above it, the server closes those that "
        "have waited longest for their clients (default: as many as the file "
        "descriptors of the process allow, at most 4096)",
    )
    slow_sender_timeout: float = Field(
        20,
        gt=0,
        description="maximum time in seconds until the headers of a request have arrived; the "
        "body must arrive at 2 KiB/s on average over this time",
    )
    slow_reader_timeout: float = Field(
        30,
        gt=0,
        description="maximum time in seconds for which a client may leave a reply unread; the "
        "client must read 2 KiB/s on average over this time, and of a stream over "
        "twice this time",
    )
    keep_alive_timeout: float = Field(
        30,
        gt=0,
        description="maximum time in seconds that a connection may wait for its next request",
    )
    stall_timeout: float = Field(
        60, gt=0, description="seconds after which an unfinished step makes /health fail"
    )
    drain_grace: float = Field(
        0,
        ge=0,
        description="seconds at shutdown during which /health replies 503 and new requests are "
        "still accepted, so that a load balancer notices",
    )
    drain_timeout: float = Field(
        30, ge=0, description="seconds at shutdown that running requests have to finish"
    )
    api_keys: SecretStr | None = Field(
        None,
        description="API keys, as NAME=KEY,NAME=KEY; each request must have one. Prefer "
        "LOGITD_API_KEYS or --api-key-file: all users of a machine can see the flags of its "
        "processes",
    )
    api_key_file: Path | None = Field(
        None,
        description="file with an API key per line, as NAME=KEY, optionally followed by limits of "
        "that key: per-minute=60 at-once=4; # begins a comment line",
    )
    key_per_minute: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="maximum number of requests per minute of each API key, counting every POST, "
        "GET /features/{index}, GET /weights and GET /weights/{name}; 0 is no limit",
    )
    key_at_once: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="maximum number of these requests of each API key at once; 0 is no limit",
    )
    public_endpoints: PublicPaths = ("/", "/static", "/docs", "/openapi.json", "/version")
    cors_origins: Origins = ()
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of log lines"
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="format of the log lines on standard error: text, or one JSON object per line",
    )

    otlp_endpoint: Collector | None = Field(
        None,
        description="OpenTelemetry collector to which a trace of each request is sent by OTLP "
        "over HTTP, such as http://127.0.0.1:4318; without one there are no traces",
    )
    trace_ratio: float = Field(
        1,
        ge=0,
        le=1,
        description="share of requests that are traced, unless their traceparent header decides",
    )

    @field_validator("admin_key")
    @classmethod
    def _is_hard_to_guess(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[!-~]{16,}", value.get_secret_value()):
            raise ValueError(
                "a key has at least 16 ASCII letters, digits and punctuation marks, and no spaces; "
                "create one with `openssl rand -hex 24`"
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
                f"it names a single model, but {len(sources)} models are served: write each as "
                "NAME=PATH"
            )
        if (name := sources[0].name) is not None:
            raise ValueError(
                f"the model already has the name {name!r} in NAME=PATH: give only one name"
            )
        return value

    @property
    def models(self) -> tuple[ModelSource, ...]:
        """The models to serve, named if there are several."""
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
        """A copy of these settings for one model, with the fields in `others` replaced."""
        changed = {"checkpoint": (source,), "served_model_name": None, **others}
        return self.model_copy(update=changed)
