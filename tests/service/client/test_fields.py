"""Fields are those of the endpoints, every one and no other."""

import pytest

from logitd.model.operations.all import OPERATIONS
from logitd.model.operations.body import PositionRange, RequestBody
from logitd.model.operations.interventions import Intervention, Source
from logitd.model.operations.operation import Operation
from logitd.model.operations.processing import Processing
from logitd.service.client import fields

ARGUMENTS = {"prompt", "stream"}
"""No keywords of a call: its first argument, and what the choice of `stream` or `generate` says."""


ARGUMENTS_OF = {
    "logits": {"top_k"},
    "activations": {"stages"},
    "sweep": {"vary", "over"},
    "detokenize": {"tokens"},
}
"""More arguments of some calls."""


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_fields_are_those_of_the_endpoint(operation: Operation) -> None:
    name = f"{operation.name.title().replace('_', '')}Fields"
    known = set(getattr(fields, name).__annotations__)
    arguments = ARGUMENTS | ARGUMENTS_OF.get(operation.name, set())
    assert known == set(operation.body.model_fields) - arguments


@pytest.mark.parametrize(
    ("ours", "theirs"), [(fields.Source, Source), (fields.Processing, Processing)]
)
def test_fields_are_those_of_the_object(ours: type, theirs: type[RequestBody]) -> None:
    assert set(ours.__annotations__) == set(theirs.model_fields)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(fields.PositionRange, PositionRange), (fields.Intervention, Intervention)],
)
def test_words_of_python_have_the_names_of_the_endpoint(
    ours: type, theirs: type[RequestBody]
) -> None:
    aliases = {field.alias or name for name, field in theirs.model_fields.items()}
    assert set(ours.__annotations__) == aliases
