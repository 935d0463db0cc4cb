"""POST /score: how likely given texts are. Nothing is sampled."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.model.inference.engine.events import PromptToken
from logitd.model.inference.engine.requests import ScoreRequest as EngineScoreRequest
from logitd.model.text.tokenizer import Tokenizer
from logitd.service.api.requests.body import body_of, described_by, unless_gone
from logitd.service.api.requests.resolve import resolve_score
from logitd.service.api.responses.text import envelope, first_likeliest, scored_json, server_timing
from logitd.service.core.errors import ERRORS
from logitd.service.core.gather import Gathered, gather, logprobs_of, perplexity
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served
from logitd.service.core.state import Ready
from logitd.service.schemas.tensors import ScoreReply, ScoreRequest

router = APIRouter()

ScoreBody = Annotated[ScoreRequest, Depends(body_of(ScoreRequest))]


@router.post(
    "/score",
    response_model=ScoreReply,
    responses=ERRORS,
    openapi_extra=described_by(ScoreRequest),
    summary="How likely given texts are",
    tags=["outputs"],
)
async def score(body: ScoreBody, models: Ready, request: Request) -> Response:
    """The logprob of each prompt, or of continuations of it: as a sum, by token if asked for, as
    perplexity and as bits per byte. A prompt with several continuations is computed once."""
    served = models.of(body.model)
    requests = await resolve_score(body, served, request)
    computed = await unless_gone(request, gather(served.session.submit(requests)))
    return Response(
        orjson.dumps(_reply(body, requests, computed, served)),
        media_type="application/json",
        headers=server_timing(computed.finishes),
    )


def _reply(
    body: ScoreRequest, requests: Sequence[EngineScoreRequest], computed: Gathered, served: Served
) -> dict[str, Any]:
    tokenizer = served.checkpoint.tokenizer
    prompts = []
    for index, request in enumerate(requests):
        scores = [
            _text_score(sequence, computed.tokens[request.request_id, sequence], body, tokenizer)
            for sequence in range(max(1, len(request.continuations)))
        ]
        scored = {"continuations": scores} if request.continuations else {"score": scores[0]}
        prompts.append({"index": index, "token_ids": request.token_ids, **scored})
    everything = [len(logprobs_of(tokens)) for tokens in computed.tokens.values()]
    usage = {
        "prompt_tokens": sum(len(request.token_ids) for request in requests),
        "scored_tokens": sum(everything),
        "cached_tokens": sum(event.cached_tokens for event in computed.finishes),
    }
    head = envelope(new_id("score"), served.checkpoint)
    return {**head, "prompts": prompts, "usage": usage}


def _text_score(
    index: int, tokens: Sequence[PromptToken], body: ScoreRequest, tokenizer: Tokenizer
) -> dict[str, Any]:
    scored = [token for token in tokens if token.chosen is not None]
    total = math.fsum(logprobs_of(scored))
    size = len(tokenizer.decode_bytes([token.token_id for token in scored]))
    score = {
        "index": index,
        "token_ids": [token.token_id for token in tokens],
        "scored_tokens": len(scored),
        "logprob": total,
        "is_greedy": all(_was_likeliest(token) for token in scored),
        "perplexity": perplexity(scored),
        "bits_per_byte": -total / math.log(2) / size if size else None,
    }
    if body.logprobs is not None:
        listed = (first_likeliest(token, body.logprobs) for token in tokens)
        score["tokens"] = [scored_json(tokenizer, token) for token in listed]
    return score


def _was_likeliest(token: PromptToken) -> bool:
    """Whether temperature 0 would have given it: of equals, only the one of the lowest id."""
    return [likeliest.token_id for likeliest in token.top[:1]] == [token.token_id]
