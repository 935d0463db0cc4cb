"""POST /probs: the distribution of the next token. Nothing is sampled."""

import asyncio
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from model.distribution import Summary, summarise
from model.tokenizer import Tokenizer
from service.openapi import ERRORS
from service.replies import envelope, new_id, token_json
from service.requests import (
    body_of,
    check_choice,
    check_logprobs,
    described_by,
    logits_request,
    prompt_ids,
    submit,
    unless_gone,
)
from service.rows import read_rows
from service.schemas import ProbsReply, ProbsRequest
from service.state import Ready, Served

router = APIRouter()

DEFAULT_TOP_K = 10

ProbsBody = Annotated[ProbsRequest, Depends(body_of(ProbsRequest))]


@router.post(
    "/probs",
    response_model=ProbsReply,
    responses=ERRORS,
    openapi_extra=described_by(ProbsRequest),
    summary="Next-token probabilities",
    tags=["numbers"],
)
async def probs(body: ProbsBody, served: Ready, request: Request) -> Response:
    """The likeliest next tokens after each prompt, or named ones, with probability, logprob and
    rank; and the entropy of the whole distribution."""
    served.check_model(body.model)
    prompts = await prompt_ids(body.prompt, served)
    check_choice(body.token_ids, body.top_k, served)
    reply = await unless_gone(request, _reply(body, prompts, served))
    return Response(orjson.dumps(reply), media_type="application/json")


async def _reply(
    body: ProbsRequest, prompts: list[tuple[int, ...]], served: Served
) -> dict[str, Any]:
    tokenizer = served.checkpoint.tokenizer
    top_k = body.top_k or DEFAULT_TOP_K
    listed = top_k if body.token_ids is None else len(body.token_ids)
    check_logprobs(
        "top_k" if body.token_ids is None else "token_ids", listed * len(prompts), served
    )
    requests = [logits_request(ids, "last", served, timeout=body.timeout) for ids in prompts]
    submission = submit(served, requests)
    rows = {}
    try:
        async for piece in read_rows(submission):
            rows[piece.request_id] = piece.rows[0]
    finally:
        submission.abort()
    summaries = [
        await asyncio.to_thread(
            summarise, rows[one.request_id], top_k=top_k, token_ids=body.token_ids
        )
        for one in requests
    ]
    results = [
        {"index": index, "token_ids": ids, **_summary_json(summary, tokenizer)}
        for index, (ids, summary) in enumerate(zip(prompts, summaries, strict=True))
    ]
    return {**envelope(new_id("probs"), served.checkpoint), "stage": "raw", "prompts": results}


def _summary_json(summary: Summary, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokens": [
            {
                **token_json(tokenizer, token.token_id),
                "prob": token.prob,
                "logprob": token.logprob,
                "rank": token.rank,
            }
            for token in summary.tokens
        ],
        "mass": summary.mass,
        "entropy": summary.entropy,
    }
