"""Fields are those of the endpoints, every one and no other."""

import pytest

from logitd.service.client import fields
from logitd.service.schemas import generate as schemas
from logitd.service.schemas import tensors as numbers
from logitd.service.schemas import tokenizer as tokenizer_schemas
from logitd.service.schemas.activations import ActivationsRequest
from logitd.service.schemas.attributions import AttributionsRequest
from logitd.service.schemas.base import PositionRange, RequestBody
from logitd.service.schemas.interventions import Intervention, Source
from logitd.service.schemas.lens import LensRequest
from logitd.service.schemas.sweep import SweepRequest

ARGUMENTS = {"prompt", "stream"}
"""No keywords of a call: its first argument, and what the choice of `stream` or `generate` says."""


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        (fields.GenerateFields, schemas.GenerateRequest, ARGUMENTS),
        (fields.LogitsFields, numbers.LogitsRequest, ARGUMENTS | {"top_k"}),
        (fields.HiddenStatesFields, numbers.HiddenStatesRequest, ARGUMENTS),
        (fields.AttentionFields, numbers.AttentionRequest, ARGUMENTS),
        (fields.ActivationsFields, ActivationsRequest, ARGUMENTS | {"stages"}),
        (fields.Source, Source, set()),
        (fields.LensFields, LensRequest, ARGUMENTS),
        (fields.AttributionsFields, AttributionsRequest, ARGUMENTS),
        (fields.SweepFields, SweepRequest, ARGUMENTS | {"vary", "over"}),
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


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(fields.PositionRange, PositionRange), (fields.Intervention, Intervention)],
)
def test_words_of_python_have_the_names_of_the_endpoint(
    ours: type, theirs: type[RequestBody]
) -> None:
    aliases = {field.alias or name for name, field in theirs.model_fields.items()}
    assert set(ours.__annotations__) == aliases
