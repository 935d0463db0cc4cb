"""Generate: text after one or several prompts, sampled token by token."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from logitd.model.inference.constraints.compiler import Constraint, Source
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.sampling.params import SamplingFields, SamplingParams
from logitd.model.operations.body import (
    ChosenIds,
    Examples,
    LogitBias,
    PromptBody,
    Reply,
    ReplyBody,
    Stage,
    TokenId,
)
from logitd.model.operations.interventions import Interventions, resolve_interventions
from logitd.model.operations.operation import (
    Compile,
    Completions,
    Operation,
    Planning,
    Subject,
    new_id,
)
from logitd.model.operations.processing import bias_by_id
from logitd.model.operations.prompts import TokenIds, encode_all, no_vocabulary
from logitd.model.operations.tokens import Token
from logitd.model.text.tokenizer import NO_VOCABULARY

MAX_STOP_LENGTH = 1024
MAX_STOP_STRINGS = 64
MAX_CHOICES = 1024
MAX_CONSTRAINT = 2**15
"""Maximum length of a regex, a grammar, a schema (as JSON), or all choices together, in
characters."""

Pattern = Annotated[str, Field(max_length=MAX_CONSTRAINT)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
]


class GenerateRequest(SamplingFields, PromptBody):
    """Generate text after one or many prompts."""

    examples: ClassVar[Examples] = {
        "The same text each time": {
            "prompt": "def main():",
            "max_tokens": 40,
            "temperature": 0.8,
            "seed": 1,
        },
        "Greedy, with the likeliest alternatives": {
            "prompt": "import os",
            "max_tokens": 20,
            "temperature": 0,
            "logprobs": 3,
        },
        "Two streams for each of two prompts": {
            "prompt": ["The", "class"],
            "n": 2,
            "max_tokens": 8,
            "stream": True,
        },
        "Until the line ends": {"prompt": "    return ", "max_tokens": 60, "stop": "\n"},
        "Text that matches a regular expression": {
            "prompt": "__version__ = ",
            "regex": '"[0-9]\\.[0-9]{1,2}\\.[0-9]{1,2}"',
            "max_tokens": 24,
        },
        "JSON that fits a schema": {
            "prompt": "# The settings as JSON:\n",
            "json_schema": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
                    "debug": {"type": "boolean"},
                },
                "required": ["name", "debug"],
                "additionalProperties": False,
            },
            "max_tokens": 60,
        },
        "One of several answers": {
            "prompt": "import os.path as ",
            "choice": ["path", "osp", "p"],
            "max_tokens": 8,
        },
        "A sentence of a grammar": {
            "prompt": "total = ",
            "grammar": 'start: TERM (" + " TERM){0,3}\nTERM: /[a-z]{1,8}/',
            "max_tokens": 40,
        },
    }

    alternatives: ClassVar[Sequence[Sequence[str]]] = (
        ("regex", "json_schema", "choice", "grammar"),
    )
    needs: ClassVar[Mapping[str, Sequence[str]]] = {"logprobs_stage": ("logprobs",)}

    max_tokens: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Maximum number of generated tokens. Absent: as many as fit. 0: only the "
        "prompt is computed.",
    )
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: ChosenIds | None = Field(
        None, description="The only token ids that can be sampled."
    )
    regex: Pattern | None = Field(
        None, description="The whole text matches this expression (syntax of Rust's regex crate)."
    )
    json_schema: dict[str, Any] | None = Field(
        None, description="The text is one JSON value that fits this schema, on one line."
    )
    choice: Choices | None = Field(
        None,
        description="The text is one of these. It is sampled token by token; to compare the "
        "probabilities of whole texts, use /score.",
    )
    grammar: Pattern | None = Field(
        None, description="The text is a sentence of this grammar, in llguidance's dialect of Lark."
    )
    stop: StopString | StopStrings = Field(
        default_factory=list,
        description="Strings that end the completion. They are not part of the text.",
    )
    stop_token_ids: list[TokenId] = Field(
        default_factory=list,
        max_length=4096,
        fail_fast=True,
        description="Tokens that end the completion.",
    )
    ignore_eos: bool = Field(False, description="Continue after the end-of-text token.")
    min_tokens: int = Field(
        0, ge=0, lt=2**31, description="The text does not end before it has this many tokens."
    )
    seed: int | None = Field(
        None,
        ge=-1,
        lt=2**64,
        description="Same seed, same tokens. Absent or -1: drawn for each prompt, and returned.",
    )
    n: int = Field(1, ge=1, le=4096, description="Completions per prompt.")
    logprobs: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="List each generated token with its logprob, and the k likeliest tokens.",
    )
    logprobs_stage: Stage = Field(
        "raw", description="Logprobs before or after bias, penalties, temperature and filters."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="List each token of the prompt with its raw logprob, and the k likeliest "
        "tokens at its position.",
    )
    echo: bool = Field(False, description="Begin text, token_ids and tokens with the prompt.")
    priority: int = Field(
        0,
        ge=-100,
        le=100,
        description="Requests with a lower number start earlier, and requests with the same "
        "number in order of arrival.",
    )
    prefix_reuse: bool = Field(
        True,
        description="Allow copying the keys and values of a prefix that was computed earlier.",
    )
    interventions: Interventions = Field(default_factory=list)
    stream: bool = Field(False, description="Answer with server-sent events.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.echo and self.logprobs is not None and self.logprobs_stage == "processed":
            raise ValueError(
                "echo also lists the prompt's logprobs, which are always raw: set logprobs_stage "
                "to 'raw', or leave out echo or logprobs_stage"
            )
        if self.ignore_eos:
            for name in self.alternatives[0]:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} determines where the text ends, but ignore_eos is true; leave "
                        f"out {name} or ignore_eos"
                    )
        return self

    @field_validator("choice")
    @classmethod
    def _distinct_choices(cls, choice: list[str] | None) -> list[str] | None:
        texts = choice or []
        if len(set(texts)) < len(texts):
            raise ValueError("choice lists a text twice; list each once")
        if (length := sum(map(len, texts))) > MAX_CONSTRAINT:
            raise ValueError(
                f"choice has {length} characters in total, but the limit is {MAX_CONSTRAINT}. "
                "Shorten it"
            )
        return choice

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def queued(self) -> tuple[int, str]:
        return len(self.prompts) * self.n, "prompt" if self.n == 1 else "n"


class ScoredPrompt(ReplyBody):
    index: int
    tokens: list[Token]


class Choice(ReplyBody):
    index: int
    prompt_index: int
    text: str
    token_ids: list[int]
    seed: int = Field(description="Seed of the prompt, which all of its n choices share.")
    tokens: list[Token] | None = Field(None, description="With logprobs.")
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = Field(
        description="The stop string or token id that ended the text."
    )


class Usage(ReplyBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = Field(description="Prompt tokens copied instead of computed.")


class Timings(ReplyBody):
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float = Field(description="Time from arrival to the first token.")
    tokens_per_second: float = Field(
        description="Generated tokens after the first of each choice, over the decoding time."
    )


class GenerateReply(Reply):
    choices: list[Choice]
    prompts: list[ScoredPrompt] | None = Field(None, description="With prompt_logprobs.")
    usage: Usage
    seed: int | None = Field(description="Seed of all prompts; null if their seeds differ.")
    timings: Timings


def plan(body: GenerateRequest, subject: Subject, *, clamp_max_tokens: bool = False) -> Planning:
    """Make one engine request per prompt. With `clamp_max_tokens`, a `max_tokens` beyond the
    context is reduced instead of refused."""
    source, tokenizer = constraint_source(body), subject.tokenizer
    if not tokenizer.has_text:
        _refuse_texts(body, source)
    prompts = encode_all(body.prompts, "prompt", subject)
    constraint: Constraint | None = None
    if source is not None:
        constraint = yield Compile(source)
    changes = yield from resolve_interventions(body.interventions, prompts, subject, generates=True)
    # All requests share these, so that long lists are stored and checked once.
    allowed = None if body.allowed_token_ids is None else tuple(body.allowed_token_ids)
    ends = frozenset((*body.stop_token_ids, *(() if body.ignore_eos else tokenizer.ends)))
    bias = bias_by_id(body.logit_bias)
    echoed = body.logprobs if body.echo else None
    listed = [k for k in (body.prompt_logprobs, echoed) if k is not None]
    requests = [
        GenerationRequest(
            request_id=new_id("gen"),
            token_ids=prompt,
            params=SamplingParams(
                max_tokens=_max_tokens(body, prompt, subject, clamp=clamp_max_tokens),
                seed=new_seed() if body.seed in (None, -1) else body.seed,
                constraint=constraint,
                stop_token_ids=ends,
                logit_bias=bias,
                allowed_token_ids=allowed,
                min_tokens=body.min_tokens,
                logprobs=body.logprobs,
                logprobs_stage=body.logprobs_stage,
                **body.sampling,
            ),
            n=body.n,
            prompt_logprobs=max(listed, default=None),
            priority=body.priority,
            prefix_reuse=body.prefix_reuse,
            interventions=interventions,
        )
        for prompt, interventions in zip(prompts, changes, strict=True)
    ]
    _check_listed(body, requests, subject)
    return Completions(
        requests, body.n, body.stop_strings, body.echo, body.logprobs, body.prompt_logprobs
    )


def new_seed() -> int:
    """A random seed for a prompt. It is below 2^53, so that JavaScript and jq read it exactly."""
    return secrets.randbits(53)


def constraint_source(body: GenerateRequest) -> Source | None:
    """The constraint of a body, if any. Validation ensures that there is at most one."""
    if body.regex is not None:
        return Source("regex", body.regex)
    if body.grammar is not None:
        return Source("grammar", body.grammar)
    if body.choice is not None:
        return Source("choice", json.dumps(body.choice))
    if body.json_schema is None:
        return None
    try:
        schema = json.dumps(body.json_schema, allow_nan=False)
    except ValueError as error:
        message = "json_schema has a number that is too large"
        raise InvalidRequest(message, "json_schema") from error
    if len(schema) > MAX_CONSTRAINT:
        raise InvalidRequest(
            f"json_schema has {len(schema)} characters, but the limit is {MAX_CONSTRAINT}. "
            "Shorten it",
            "json_schema",
        )
    return Source("json_schema", schema)


def _refuse_texts(body: GenerateRequest, source: Source | None) -> None:
    """Raise InvalidRequest for stop strings and constraints, which need a vocabulary."""
    if body.stop_strings:
        raise no_vocabulary("stop")
    if source is not None:
        raise InvalidRequest(
            f"{source.kind} constrains text, but {NO_VOCABULARY}; use allowed_token_ids to limit "
            "the ids",
            source.kind,
            "no_vocabulary",
        )


def _max_tokens(body: GenerateRequest, prompt: TokenIds, subject: Subject, *, clamp: bool) -> int:
    # At least 1: validation refuses a prompt that leaves no room for a token.
    room = max(1, subject.context_length - len(prompt))
    if body.max_tokens is None:
        return room
    return min(body.max_tokens, room) if clamp else body.max_tokens


def _check_listed(
    body: GenerateRequest, requests: list[GenerationRequest], subject: Subject
) -> None:
    generated = sum(request.params.max_tokens for request in requests) * body.n
    prompted = sum(len(request.token_ids) for request in requests)
    count, param = 0, "logprobs"
    if body.prompt_logprobs is not None:
        count, param = prompted * (1 + body.prompt_logprobs), "prompt_logprobs"
    if body.logprobs is not None:
        echoed = prompted * body.n if body.echo else 0
        count, param = count + (generated + echoed) * (1 + body.logprobs), "logprobs"
    subject.check_listed(count, "logprobs", param)


GENERATE = Operation(
    name="generate",
    body=GenerateRequest,
    reply=GenerateReply,
    plan=plan,
    form="completions",
    tag="generation",
    id_prefix="gen",
    summary="Sampled text, as one reply or a stream of events",
    description="""\
Continue a prompt. With `stream`, the reply is a stream of server-sent events: chunks with the new
text and tokens of the choices, then a chunk with `usage` and `timings`, then `[DONE]`.

The same request with the same seed generates the same tokens in any batch.""",
)
