"""Results have the members of the endpoints' replies, every one and no other."""

from dataclasses import MISSING, fields

import pytest
from pydantic import BaseModel

from logitd.model.operations import (
    attributions,
    body,
    generate,
    probs,
    score,
    tokenize,
    tokens,
)
from logitd.service import client
from logitd.service.client import errors, results
from logitd.service.client import fields as client_fields
from logitd.service.schemas import status

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
        (results.Checkpoint, body.CheckpointName),
        (results.TopToken, tokens.TopToken),
        (results.Token, tokens.Token),
        (results.ScoredPrompt, generate.ScoredPrompt),
        (results.Choice, generate.Choice),
        (results.Usage, generate.Usage),
        (results.Timings, generate.Timings),
        (results.Generation, generate.GenerateReply),
        (results.TokenProb, tokens.TokenProb),
        (results.PromptProbs, probs.PromptProbs),
        (results.Probs, probs.ProbsReply),
        (results.TargetToken, attributions.TargetToken),
        (results.AttributedToken, attributions.AttributedToken),
        (results.PathSummary, attributions.PathSummary),
        (results.DirectPart, attributions.DirectPart),
        (results.DirectContributions, attributions.DirectContributions),
        (results.PromptAttributions, attributions.PromptAttributions),
        (results.Attributions, attributions.AttributionsReply),
        (results.TextScore, score.TextScore),
        (results.PromptScores, score.PromptScores),
        (results.ScoreUsage, score.ScoreUsage),
        (results.Scores, score.ScoreReply),
        (results.Piece, tokenize.Piece),
        (results.Tokenized, tokenize.TokenizeReply),
        (results.Detokenized, tokenize.DetokenizeReply),
        (results.TokenizerInfo, status.TokenizerInfo),
        (results.QuantizationInfo, status.QuantizationInfo),
        (results.ModelStatus, status.ModelStatus),
        (results.Info, status.Info),
        (results.Health, status.Health),
    ],
)
def test_members_are_those_of_the_reply(ours: type, theirs: type[BaseModel]) -> None:
    members = {field.name: field for field in fields(ours) if field.name not in OURS}
    assert set(members) == set(theirs.model_fields)
    for name, field in theirs.model_fields.items():
        needed = members[name].default is MISSING
        assert needed == field.is_required(), f"{name} is needed by one side alone"
