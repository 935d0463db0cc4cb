"""POST /probs: the distribution of the next token. Nothing is sampled."""

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from model.distribution import Summary, summarise
from model.tokenizer import Tokenizer
from service.errors import bad_request, clip
from service.numbers.gathering import gather, perplexity
from service.numbers.schemas import ProbsReply, ProbsRequest
from service.openapi import ERRORS
from service.replies import envelope, new_id, token_json
from service.requests import (
    body_of,
    check_choice,
    check_logprobs,
    described_by,
    prompt_ids,
    rows_request,
    score_request,
    submit,
    unless_gone,
    wanted_logits,
)
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
    token_ids = _named(body, tokenizer)
    top_k = body.top_k or DEFAULT_TOP_K
    listed = len(prompts) * (top_k if token_ids is None else len(token_ids))
    check_logprobs("top_k" if token_ids is None else "token_ids", listed, served)
    wanted = wanted_logits(body.stage, body.processing)
    rows = [rows_request(ids, "last", wanted, served, timeout=body.timeout) for ids in prompts]
    scores = [score_request(ids, (), served, top=0, timeout=body.timeout) for ids in prompts]
    computed = await gather(submit(served, [*rows, *scores] if body.perplexity else rows))
    results = []
    for index, (ids, row, score) in enumerate(zip(prompts, rows, scores, strict=True)):
        logits = computed.rows[row.request_id][0]
        summary = summarise(
            logits, top_k=None if token_ids is not None else top_k, token_ids=token_ids
        )
        result = {"index": index, "token_ids": ids, **_summary_json(summary, tokenizer)}
        if body.perplexity:
            result["perplexity"] = perplexity(computed.tokens[score.request_id, 0])
        results.append(result)
    head = envelope(new_id("probs"), served.checkpoint)
    return {**head, "stage": body.stage, "prompts": results}


def _named(body: ProbsRequest, tokenizer: Tokenizer) -> list[int] | None:
    """The ids of the tokens that the body names, if it names any."""
    if body.tokens is None:
        return body.token_ids
    return [_single(text, tokenizer) for text in body.tokens]


def _single(text: str, tokenizer: Tokenizer) -> int:
    """The id of a text that is one token, or the name of a special one."""
    if text in tokenizer.special_tokens:
        return tokenizer.special_tokens[text]
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise bad_request(
            f"{clip(text)!r} is {len(ids)} tokens ({clip(str(ids))}); each of tokens must be one",
            "tokens",
        )
    return ids[0]


def _summary_json(summary: Summary, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokens": [
            {
                **token_json(tokenizer, token.token_id),
                "prob": token.prob,
                "logprob": token.logprob,  # -inf is written as null
                "rank": token.rank,
            }
            for token in summary.tokens
        ],
        "mass": summary.mass,
        "entropy": summary.entropy,
    }
