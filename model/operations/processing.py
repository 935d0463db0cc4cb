"""Processing: what the sampler's steps make of logits, as fields of a body and as engine output.

The fields are separate from those of /generate, because `top_k` of other operations says how much
of a reply is listed.
"""

import re
from typing import Annotated

from pydantic import Field, model_validator

from logitd.model.inference.engine.requests import Logits
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.sampling.params import SamplingFields, SamplingParams
from logitd.model.operations.body import ChosenIds, LogitBias, RequestBody
from logitd.model.operations.prompts import clip

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""An id as the key of a JSON object: one spelling each, so that no key overwrites another."""
PROCESSED_NEEDS_STAGE = (
    "processing is given and stage is 'raw'; set stage to 'processed', or leave processing out"
)


class Processing(SamplingFields, RequestBody):
    """What happens to the logits before a token is sampled; the definitions are those of
    /generate."""

    temperature: Annotated[float, Field(ge=0, le=1e6)] = Field(
        1.0, description="0 leaves the logits as they are."
    )
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="Keep the k likeliest. 0: all."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Keep the likeliest that make up p."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Keep those at least p times as likely as the likeliest."
    )
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: ChosenIds | None = Field(None, description="No other token is kept.")
    completion_start: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="The position from which the prompt's tokens count as generated, for the "
        "presence and frequency penalties.",
    )

    @model_validator(mode="after")
    def _something_generated(self) -> "Processing":
        if (self.presence_penalty or self.frequency_penalty) and self.completion_start is None:
            raise ValueError(
                "presence_penalty and frequency_penalty look at generated tokens: say with "
                "completion_start from which position the prompt's tokens count as such"
            )
        return self


def logits_output(
    stage: str, processing: Processing | None, columns: tuple[int, ...] | None = None
) -> Logits:
    """Raw logits, or what the sampler's steps make of them."""
    if stage == "raw":
        return Logits(columns=columns)
    fields = processing or Processing()
    allowed = fields.allowed_token_ids
    params = SamplingParams(
        max_tokens=1,
        seed=0,  # nothing is sampled
        logit_bias=bias_by_id(fields.logit_bias),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        **fields.sampling,
    )
    return Logits(columns=columns, processing=params, completion_start=fields.completion_start)


def bias_by_id(biases: dict[str, float]) -> dict[int, float]:
    """The same with ids as keys, which are strings in JSON."""
    for key in biases:
        if not TOKEN_ID.fullmatch(key):
            raise InvalidRequest(
                f"logit_bias has the key {clip(key)!r}; keys are token ids", "logit_bias"
            )
    return {int(key): bias for key, bias in biases.items()}
