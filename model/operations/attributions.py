"""Attributions: which tokens and which parts of the model a logit depends on."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from logitd.model.inference.attribution.task import (
    DEFAULT_STEPS,
    Attribution,
    AttributionTask,
    Method,
)
from logitd.model.inference.engine.requests import AttributionRequest
from logitd.model.inference.selection import resolve_indices
from logitd.model.operations.body import (
    Examples,
    ModelName,
    Place,
    PromptBody,
    Reply,
    ReplyBody,
    Text,
    Timeout,
    TokenId,
)
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import Operation, Planning, Record, Subject, new_id
from logitd.model.operations.prompts import encode_all, named_token
from logitd.model.operations.tokens import token_json
from logitd.model.text.tokenizer import Tokenizer


class AttributionsRequest(PromptBody):
    """What the logit of a token hangs on, or the difference of two tokens' logits: by token of the
    prompt, and by head and MLP. Computed in float32 from the weights that are served."""

    examples: ClassVar[Examples] = {
        "Which tokens does the likeliest next one hang on?": {"prompt": "for i in range(10"},
        "One token rather than another, along a path from zero": {
            "prompt": "for i in range(10",
            "token": ")",
            "minus": ",",
            "methods": ["integrated_gradients"],
            "steps": 8,
        },
        "What each head and MLP adds": {
            "prompt": "import os",
            "methods": ["gradient_times_input", "direct"],
        },
    }

    token: Text | None = Field(None, description="Whose logit is attributed, by text.")
    token_id: TokenId | None = Field(
        None, description="The same by id. Without either: the likeliest next token."
    )
    minus: Text | None = Field(None, description="Whose logit is subtracted, by text.")
    minus_id: TokenId | None = Field(None, description="The same by id.")
    position: Place = Field(
        -1, description="Of the prompt, whose logits these are; negative ones count from the end."
    )
    methods: Annotated[list[Method], Field(min_length=1, max_length=3)] = Field(
        ["gradient_times_input"],
        description="gradient_times_input: the gradient with respect to each token's vector, times "
        "that vector; integrated_gradients: the same along a path from a baseline; direct: what "
        "the embedding, each head, each bias and each MLP adds by itself.",
    )
    steps: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="Of integrated gradients (absent: 32); each is a forward and a backward pass.",
    )
    baseline: Literal["zero"] | TokenId | None = Field(
        None,
        description="Of integrated gradients: 'zero' vectors (absent: these), or the embedding of "
        "this token id at every position.",
    )
    timeout: Timeout = None
    model: ModelName = None

    @model_validator(mode="after")
    def _consistent(self) -> "AttributionsRequest":
        if self.token is not None and self.token_id is not None:
            raise ValueError("token and token_id both name the token; give one of them")
        if self.minus is not None and self.minus_id is not None:
            raise ValueError("minus and minus_id both name the other token; give one of them")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods names a method twice: {self.methods}")
        for name in ("steps", "baseline"):
            if getattr(self, name) is not None and "integrated_gradients" not in self.methods:
                raise ValueError(
                    f"{name} is given and methods has no 'integrated_gradients'; add it, or leave "
                    f"{name} out"
                )
        return self


class TargetToken(ReplyBody):
    id: int
    text: str
    bytes: list[int]
    logit: float


class AttributedToken(ReplyBody):
    """A token of the prompt, with what each method that was asked for attributes to it. Those
    behind the position have 0."""

    id: int
    text: str
    bytes: list[int]
    gradient_times_input: float | None = None
    integrated_gradients: float | None = None


class PathSummary(ReplyBody):
    """How well the steps of integrated gradients add up."""

    steps: int
    baseline: Literal["zero"] | int
    baseline_value: float = Field(description="The target at the baseline.")
    sum: float = Field(description="Of the tokens' attributions.")
    gap: float = Field(description="sum - (value - baseline_value): 0 with ever more steps.")


class DirectPart(ReplyBody):
    """`stage` is embedding, blocks.N.attention.heads (with `head`), blocks.N.attention.bias,
    blocks.N.mlp.out, final_norm.bias or head.bias; where norms stand behind the sums also
    blocks.N.attention.norm.bias and blocks.N.mlp.norm.bias."""

    stage: str
    head: int | None
    value: float


class DirectContributions(ReplyBody):
    parts: list[DirectPart] = Field(description="In the order of the forward.")
    sum: float = Field(description="Of the parts: the value, but for rounding.")


class PromptAttributions(ReplyBody):
    index: int
    token_ids: list[int]
    position: int
    token: TargetToken
    minus: TargetToken | None
    value: float = Field(description="The target: the logit, less the other's where there is one.")
    tokens: list[AttributedToken]
    integrated_gradients: PathSummary | None = None
    direct: DirectContributions | None = None


class AttributionsReply(Reply):
    prompts: list[PromptAttributions]


def plan(body: AttributionsRequest, subject: Subject) -> Planning:
    """One engine request per prompt."""
    yield from ()
    prompts = encode_all(body.prompts, "prompt", subject)
    token = named_token(body.token, body.token_id, subject.tokenizer, "token")
    minus = named_token(body.minus, body.minus_id, subject.tokenizer, "minus")
    requests = [
        AttributionRequest(
            request_id=new_id("attribution"),
            token_ids=prompt,
            task=AttributionTask(
                position=_position(body.position, len(prompt)),
                token_id=token,
                minus_id=minus,
                methods=tuple(body.methods),
                steps=DEFAULT_STEPS if body.steps is None else body.steps,
                baseline=body.baseline if isinstance(body.baseline, int) else None,
            ),
        )
        for prompt in prompts
    ]
    # Heads, MLP and bias of each block with the biases of two norms; embedding, two biases.
    config = subject.config
    parts = config.n_layer * (config.n_head + 4) + 3 if "direct" in body.methods else 0
    listed = sum(map(len, prompts)) + parts * len(prompts)
    subject.check_listed(listed, "tokens and parts", "prompt")

    def reply(computed: Computed) -> dict[str, Any]:
        found = [computed.attributions[request.request_id] for request in requests]
        return {"prompts": _prompts_json(requests, found, subject.tokenizer)}

    return Record(requests, reply)


def _position(position: int, length: int) -> int:
    """The position from the start; any for an empty prompt, which validation rejects."""
    if not length:
        return 0
    (resolved,) = resolve_indices("position", [position], length, f"the prompt has {length} tokens")
    return resolved


def _prompts_json(
    requests: Sequence[AttributionRequest], found: Sequence[Attribution], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The PromptAttributions of each prompt."""
    return [
        {
            "index": index,
            "token_ids": request.token_ids,
            "position": request.task.position,
            **_attribution_json(attribution, request.token_ids, request.task, tokenizer),
        }
        for index, (request, attribution) in enumerate(zip(requests, found, strict=True))
    ]


def _attribution_json(
    attribution: Attribution,
    token_ids: Sequence[int],
    task: AttributionTask,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    path = attribution.integrated_gradients
    by_method = {
        "gradient_times_input": attribution.gradient_times_input,
        "integrated_gradients": None if path is None else path.values,
    }
    tokens = [token_json(tokenizer, token_id) for token_id in token_ids]
    for method, values in by_method.items():
        if values is not None:
            for token, value in zip(tokens, values, strict=True):
                token[method] = value
    minus = None
    if attribution.minus_id is not None:
        minus = {**token_json(tokenizer, attribution.minus_id), "logit": attribution.minus_logit}
    result: dict[str, Any] = {
        "token": {**token_json(tokenizer, attribution.token_id), "logit": attribution.logit},
        "minus": minus,
        "value": attribution.target,
        "tokens": tokens,
    }
    if path is not None:
        result["integrated_gradients"] = {
            "steps": task.steps,
            "baseline": "zero" if task.baseline is None else task.baseline,
            "baseline_value": path.baseline_target,
            "sum": path.sum,
            "gap": path.gap,
        }
    if attribution.direct is not None:
        result["direct"] = {
            "parts": [
                {"stage": part.stage, "head": part.head, "value": part.value}
                for part in attribution.direct
            ],
            "sum": attribution.direct_sum,
        }
    return result


ATTRIBUTIONS = Operation(
    name="attributions",
    body=AttributionsRequest,
    reply=AttributionsReply,
    plan=plan,
    form="record",
    reply_id="attributions",
    summary="Tokens, heads and MLPs that a logit depends on",
    description="""\
The gradient of a token's logit, or of the difference of two, with respect to the vector of
each token of the prompt, times that vector, at the prompt or along a path from a baseline; and
what each head, bias and MLP adds to it by itself. Other requests go on meanwhile: a step
computes one block of one prompt.""",
)
