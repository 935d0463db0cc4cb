"""Processing: the changes that the sampler makes to logits before it draws a token.

In a body, `Processing` is a nested object, because the body's own `top_k` is something else: the
number of tokens that a reply lists.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from logitd.model.inference.engine.requests import Logits
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.sampling.params import SamplingFields, SamplingParams
from logitd.model.operations.body import ChosenIds, LogitBias, RequestBody, Stage
from logitd.model.operations.prompts import clip

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""A token id as a key of a JSON object. Every id has only one spelling, so that two keys cannot
mean the same id."""


class Processing(SamplingFields, RequestBody):
    """The steps that the sampler applies to logits, with the fields of /generate."""

    needs: ClassVar[Mapping[str, Sequence[str]]] = {
        "completion_start": ("presence_penalty", "frequency_penalty")
    }

    temperature: Annotated[float, Field(ge=0, le=1e6)] = Field(
        1.0, description="0 skips temperature, top_k, top_p and min_p."
    )
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: ChosenIds | None = Field(
        None, description="The only token ids that are kept."
    )
    completion_start: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Tokens of the prompt from this position on count as generated, for the "
        "presence and frequency penalties.",
    )

    @model_validator(mode="after")
    def _something_generated(self) -> Self:
        if (self.presence_penalty or self.frequency_penalty) and self.completion_start is None:
            raise ValueError(
                "presence_penalty and frequency_penalty count generated tokens: set "
                "completion_start to the position of the first token that counts as generated"
            )
        return self


class StageBody(RequestBody):
    """A request for logits before or after processing."""

    stage: Stage = Field("raw", description="Logits before or after `processing`.")
    processing: Processing | None = Field(
        None,
        description="Steps that stage 'processed' applies to the logits. The logit of a removed "
        "token is -inf, null in JSON.",
    )

    @model_validator(mode="after")
    def _stage_of_processing(self) -> Self:
        if self.processing is not None and self.stage == "raw":
            raise ValueError(
                "processing is given, but stage is 'raw'; set stage to 'processed', or leave "
                "processing out"
            )
        return self


def logits_output(body: StageBody, columns: tuple[int, ...] | None = None) -> Logits:
    """The engine's output for the logits of `columns` (None: all), raw or processed."""
    if body.stage == "raw":
        return Logits(columns=columns)
    fields = body.processing or Processing()
    allowed = fields.allowed_token_ids
    params = SamplingParams(
        max_tokens=1,
        seed=0,  # unused: no token is sampled
        logit_bias=bias_by_id(fields.logit_bias),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        **fields.sampling,
    )
    return Logits(columns=columns, processing=params, completion_start=fields.completion_start)


def bias_by_id(biases: dict[str, float]) -> dict[int, float]:
    """The biases with integers as keys; in JSON the keys are strings."""
    for key in biases:
        if not TOKEN_ID.fullmatch(key):
            raise InvalidRequest(
                f"logit_bias has the key {clip(key)!r}; keys are token ids", "logit_bias"
            )
    return {int(key): bias for key, bias in biases.items()}
