"""Results have the members of the endpoints' replies, every one and no other."""

from dataclasses import MISSING, fields

import pytest
from pydantic import BaseModel

from logitd.service import client
from logitd.service.client import errors, results
from logitd.service.client import fields as client_fields
from logitd.service.schemas import attributions
from logitd.service.schemas import generate as schemas
from logitd.service.schemas import tensors as numbers
from logitd.service.schemas import tokenizer as tokenizer_schemas

OURS = {"request_id"}
"""What comes from a reply's header."""


def test_every_result_error_and_group_of_fields_has_a_public_name() -> None:
    for module in (results, errors, client_fields):
        own = {
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        }
        assert own <= set(client.__all__), own - set(client.__all__)
        assert len(own) > 5


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (results.Checkpoint, schemas.CheckpointName),
        (results.TopToken, schemas.TopToken),
        (results.Token, schemas.Token),
        (results.ScoredPrompt, schemas.ScoredPrompt),
        (results.Choice, schemas.Choice),
        (results.Usage, schemas.Usage),
        (results.Timings, schemas.Timings),
        (results.Generation, schemas.GenerateReply),
        (results.TokenProb, numbers.TokenProb),
        (results.PromptProbs, numbers.PromptProbs),
        (results.Probs, numbers.ProbsReply),
        (results.TargetToken, attributions.TargetToken),
        (results.AttributedToken, attributions.AttributedToken),
        (results.PathSummary, attributions.PathSummary),
        (results.DirectPart, attributions.DirectPart),
        (results.DirectContributions, attributions.DirectContributions),
        (results.PromptAttributions, attributions.PromptAttributions),
        (results.Attributions, attributions.AttributionsReply),
        (results.TextScore, numbers.TextScore),
        (results.PromptScores, numbers.PromptScores),
        (results.ScoreUsage, numbers.ScoreUsage),
        (results.Scores, numbers.ScoreReply),
        (results.Piece, tokenizer_schemas.Piece),
        (results.Tokenized, tokenizer_schemas.TokenizeReply),
        (results.Detokenized, tokenizer_schemas.DetokenizeReply),
        (results.TokenizerInfo, tokenizer_schemas.TokenizerInfo),
        (results.QuantizationInfo, schemas.QuantizationInfo),
        (results.ModelStatus, schemas.ModelStatus),
        (results.Info, schemas.Info),
        (results.Health, schemas.Health),
    ],
)
def test_members_are_those_of_the_reply(ours: type, theirs: type[BaseModel]) -> None:
    members = {field.name: field for field in fields(ours) if field.name not in OURS}
    assert set(members) == set(theirs.model_fields)
    for name, field in theirs.model_fields.items():
        needed = members[name].default is MISSING
        assert needed == field.is_required(), f"{name} is needed by one side alone"
