"""Fields are those of the endpoints, every one and no other."""

import pytest

from service.client import fields
from service.schemas import generate as schemas
from service.schemas import tensors as numbers
from service.schemas import tokenizer as tokenizer_schemas
from service.schemas.base import PositionRange, RequestBody

ARGUMENTS = {"prompt", "stream"}
"""No keywords of a call: its first argument, and what the choice of `stream` or `generate` says."""


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        (fields.GenerateFields, schemas.GenerateRequest, ARGUMENTS),
        (fields.LogitsFields, numbers.LogitsRequest, ARGUMENTS | {"top_k"}),
        (fields.HiddenStatesFields, numbers.HiddenStatesRequest, ARGUMENTS),
        (fields.AttentionFields, numbers.AttentionRequest, ARGUMENTS),
        (fields.ProbsFields, numbers.ProbsRequest, ARGUMENTS),
        (fields.ScoreFields, numbers.ScoreRequest, ARGUMENTS),
        (fields.TokenizeFields, tokenizer_schemas.TokenizeRequest, ARGUMENTS),
        (fields.DetokenizeFields, tokenizer_schemas.DetokenizeRequest, {"tokens"}),
        (fields.Processing, numbers.Processing, set()),
    ],
)
def test_fields_are_those_of_the_endpoint(
    ours: type, theirs: type[RequestBody], more: set[str]
) -> None:
    assert set(ours.__annotations__) == set(theirs.model_fields) - more


def test_a_range_of_positions_has_the_names_of_the_endpoint() -> None:
    aliases = {field.alias or name for name, field in PositionRange.model_fields.items()}
    assert set(fields.PositionRange.__annotations__) == aliases
