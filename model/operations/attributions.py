"""Attributions: how much each token and each part of the model contributes to a logit."""

import math
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from logitd.model.inference.attribution.task import (
    DEFAULT_STEPS,
    Attribution,
    AttributionTask,
    Method,
    Probe,
)
from logitd.model.inference.engine.requests import AttributionRequest
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.selection import gpt_only, resolve_stages
from logitd.model.operations.activations import MAX_PATTERNS
from logitd.model.operations.body import (
    Examples,
    Place,
    PromptBody,
    PromptReply,
    Reply,
    ReplyBody,
    RequestBody,
    TokenId,
)
from logitd.model.operations.computed import Computed
from logitd.model.operations.interventions import Row, Rows, StageName, as_array
from logitd.model.operations.operation import Operation, Planning, Subject, new_id
from logitd.model.operations.prompts import encode_all, prompts_record, resolve_position
from logitd.model.operations.tokens import ComparedTokens, NamedToken, token_json
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.stages import UnknownStage, match_stages

LISTED_NUMBER = 8
"""Each number in a list counts as this many elements of a reply, because it takes 32 bytes in
Python and 20 bytes as JSON."""


class Direction(RequestBody):
    """A direction at a stage, such as the weights of a linear probe."""

    stage: StageName
    values: Row | Rows = Field(description="Numbers in the shape of the stage at one position.")


class AttributionsRequest(ComparedTokens, PromptBody):
    """How much the tokens of the prompt, the heads and the MLPs contribute to a token's logit, or
    to the difference between two logits. Computed in float32 from the served weights."""

    examples: ClassVar[Examples] = {
        "The prompt tokens behind the likeliest next token": {"prompt": "for i in range(10"},
        "Why one token is likelier than another, along a path from zero": {
            "prompt": "for i in range(10",
            "token": ")",
            "minus": ",",
            "methods": ["integrated_gradients"],
            "steps": 8,
        },
        "The share of each head and MLP": {
            "prompt": "import os",
            "methods": ["gradient_times_input", "direct"],
        },
        "The gradient with respect to every head's output": {
            "prompt": "import os",
            "stages": ["blocks.*.attention.heads"],
        },
    }

    stages: Annotated[list[StageName], Field(min_length=1, max_length=MAX_PATTERNS)] | None = Field(
        None,
        description="Stages whose gradients are returned, by names from GET /stages; * means every "
        "layer. Each is the gradient of the target with respect to the stage's value at each "
        "position.",
    )
    direction: Direction | None = Field(
        None,
        description="Target instead of a token's logit: the product of a direction with the value "
        "of a stage at the position.",
    )
    position: Place = Field(
        -1,
        description="Position of the prompt whose logits are attributed; negative numbers count "
        "from the end.",
    )
    methods: Annotated[list[Method], Field(min_length=1, max_length=3)] = Field(
        ["gradient_times_input"],
        description="gradient_times_input: the gradient with respect to each token's vector, times "
        "that vector; integrated_gradients: the same along a path from a baseline; direct: the "
        "direct share of the embedding, each head, each bias and each MLP. In a model with "
        "logit_softcap, these are shares of the logit before the cap.",
    )
    steps: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="Steps of integrated gradients (absent: 32), each a forward and a backward "
        "pass.",
    )
    baseline: Literal["zero"] | TokenId | None = Field(
        None,
        description="Baseline of integrated gradients: 'zero' for vectors of zeros (the default), "
        "or a token id, whose embedding is used at every position.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods names a method twice: {self.methods}")
        for name in ("steps", "baseline"):
            if getattr(self, name) is not None and "integrated_gradients" not in self.methods:
                raise ValueError(
                    f"{name} is given, but methods has no 'integrated_gradients'; add it, or leave "
                    f"{name} out"
                )
        named = [name for name in ("token", "token_id", "minus", "minus_id") if self._is_set(name)]
        if self.direction is not None and named:
            raise ValueError(f"direction and {named[0]} are alternatives; give one of them")
        return self


class TargetToken(NamedToken):
    logit: float = Field(
        description="If the model has logit_softcap, the logit before the cap, and so are all "
        "numbers that follow from it."
    )


class AttributedToken(NamedToken):
    """A token of the prompt, with its attribution by each requested method. Tokens after the
    position of the logit have an attribution of 0."""

    gradient_times_input: float | None = None
    integrated_gradients: float | None = None


class PathSummary(ReplyBody):
    """Accuracy of the integrated gradients computed with this number of steps."""

    steps: int
    baseline: Literal["zero"] | int
    baseline_value: float = Field(description="The target at the baseline.")
    sum: float = Field(description="Sum of the tokens' attributions.")
    gap: float = Field(description="sum - (value - baseline_value): tends to 0 with more steps.")


class DirectPart(ReplyBody):
    """The contribution of one part of the model to the logit. `stage` is embedding,
    blocks.N.attention.heads (with `head`), blocks.N.attention.bias, blocks.N.mlp.out,
    final_norm.bias or head.bias; if the model has norms after the residual additions, also
    blocks.N.attention.norm.bias and blocks.N.mlp.norm.bias."""

    stage: str
    head: int | None
    value: float


class DirectContributions(ReplyBody):
    parts: list[DirectPart] = Field(description="In the order of the forward pass.")
    sum: float = Field(description="Sum of the parts: the value, up to rounding.")


class PromptAttributions(PromptReply):
    position: int
    token: TargetToken | None = Field(description="null if the target is a direction.")
    minus: TargetToken | None
    value: float = Field(
        description="The target: the logit of `token`, minus the logit of `minus` if given, or the "
        "product with the direction. Logits are those before logit_softcap."
    )
    tokens: list[AttributedToken]
    integrated_gradients: PathSummary | None = None
    direct: DirectContributions | None = None
    gradients: dict[str, list[Any]] | None = Field(
        None,
        description="Nested lists by stage, as in /activations, for all positions of the prompt; 0 "
        "after the position.",
    )


class AttributionsReply(Reply):
    prompts: list[PromptAttributions]


def plan(body: AttributionsRequest, subject: Subject) -> Planning:
    yield from ()
    config = gpt_only(subject.config, "attributions")
    prompts = encode_all(body.prompts, "prompt", subject)
    token, minus = body.compared(subject.tokenizer)
    stages = resolve_stages(body.stages, config) if body.stages else ()
    elements = sum(
        math.prod(each.shape(config, len(p))) * len(p) for p in prompts for each in stages
    )
    held = LISTED_NUMBER * elements
    subject.check_array(held)
    probe = None if body.direction is None else _probe(body.direction, config)
    requests = [
        AttributionRequest(
            request_id=new_id("attribution"),
            token_ids=prompt,
            task=AttributionTask(
                position=resolve_position(body.position, len(prompt)),
                token_id=token,
                minus_id=minus,
                probe=probe,
                stages=tuple(stage.name for stage in stages),
                methods=tuple(body.methods),
                steps=DEFAULT_STEPS if body.steps is None else body.steps,
                baseline=body.baseline if isinstance(body.baseline, int) else None,
            ),
        )
        for prompt in prompts
    ]
    # Parts of each block: heads, MLP, bias, biases of two norms. Others: embedding, two biases.
    parts = config.n_layer * (config.n_head + 4) + 3 if "direct" in body.methods else 0
    listed = sum(map(len, prompts)) + parts * len(prompts)
    subject.check_listed(listed, "tokens and parts", "prompt")
    return prompts_record(requests, partial(_attribution_json, tokenizer=subject.tokenizer), held)


def _probe(direction: Direction, config: GPTConfig) -> Probe:
    try:
        (stage, *others) = match_stages([direction.stage], config)
    except UnknownStage as error:
        raise InvalidRequest(f"direction.stage: {error}", "direction") from error
    if others:
        raise InvalidRequest(
            f"direction.stage is {direction.stage!r}, which names several stages; name one",
            "direction",
        )
    try:
        return Probe(stage.name, as_array(direction.values, "direction.values"))
    except InvalidRequest as error:
        raise InvalidRequest(str(error), "direction") from error


def _attribution_json(
    request: AttributionRequest, computed: Computed, *, tokenizer: Tokenizer
) -> dict[str, Any]:
    attribution: Attribution = computed.attributions[request.request_id]
    task, path = request.task, attribution.integrated_gradients
    assert isinstance(task, AttributionTask)
    by_method = {
        "gradient_times_input": attribution.gradient_times_input,
        "integrated_gradients": None if path is None else path.values,
    }
    tokens = [token_json(tokenizer, token_id) for token_id in request.token_ids]
    for method, values in by_method.items():
        if values is not None:
            for token, value in zip(tokens, values, strict=True):
                token[method] = value
    minus = None
    if attribution.minus_id is not None:
        minus = {**token_json(tokenizer, attribution.minus_id), "logit": attribution.minus_logit}
    target: dict[str, Any] | None = None
    if attribution.token_id is not None:
        target = {**token_json(tokenizer, attribution.token_id), "logit": attribution.logit}
    result: dict[str, Any] = {
        "position": task.position,
        "token": target,
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
            "parts": [asdict(part) for part in attribution.direct],
            "sum": attribution.direct_sum,
        }
    if attribution.gradients:
        result["gradients"] = {name: at.tolist() for name, at in attribution.gradients.items()}
    return result


ATTRIBUTIONS = Operation(
    name="attributions",
    body=AttributionsRequest,
    reply=AttributionsReply,
    plan=plan,
    form="record",
    summary="Contributions of tokens, heads and MLPs to a logit",
    description="""\
The target is a token's logit, the difference between two logits, or a direction at a stage. The
gradient methods multiply the vector of each token of the prompt by the gradient of the target: the
gradient at the prompt itself, or its mean along a path from a baseline. The method `direct` lists
the share that each head, bias and MLP adds to the logit. With `stages`, the reply also has the
gradients with respect to these stages. Other requests are computed in between: a step of the engine
computes one block of one prompt.""",
)
