"""POST /probs: the distribution of the next token. Nothing is sampled."""

import asyncio
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from model.inference.engine.requests import OutputsRequest
from model.inference.sampling.distribution import Summary, summarise
from model.text.tokenizer import Tokenizer
from service.core.errors import ERRORS, bad_request, clip
from service.core.ids import new_id
from service.core.state import Ready, Served
from service.requests.body import body_of, described_by, unless_gone
from service.requests.prompts import encode_text, prompt_ids
from service.requests.resolve import (
    check_choice,
    check_logprobs,
    outputs_request,
    requested_logits,
    score_request,
)
from service.requests.submit import submit
from service.responses.tensors.gather import Gathered, gather, perplexity
from service.responses.text import envelope, server_timing, token_json
from service.schemas.tensors import ProbsReply, ProbsRequest

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
    computation = _Computation(body, prompts, served)
    computed = await unless_gone(request, computation.run())
    reply = await asyncio.to_thread(computation.reply, computed)  # sorts whole vocabularies
    return Response(
        orjson.dumps(reply),
        media_type="application/json",
        headers=server_timing(computed.finishes),
    )


class _Computation:
    """The rows of one request, and the scores of its prompts where these are wanted too."""

    def __init__(self, body: ProbsRequest, prompts: list[tuple[int, ...]], served: Served) -> None:
        self._body = body
        self._served = served
        self._token_ids = _named(body, served.checkpoint.tokenizer)
        self._top_k = body.top_k or DEFAULT_TOP_K
        listed = self._top_k if self._token_ids is None else len(self._token_ids)
        param = "top_k" if self._token_ids is None else "token_ids"
        check_logprobs(param, listed * len(prompts), served)
        wanted = requested_logits(body.stage, body.processing)
        self._rows = [
            outputs_request(ids, "last", wanted, served, timeout=body.timeout) for ids in prompts
        ]
        self._scores = [
            score_request(ids, (), served, top=0, timeout=body.timeout)
            for ids in prompts
            if body.perplexity
        ]

    async def run(self) -> Gathered:
        return await gather(submit(self._served, [*self._rows, *self._scores]))

    def reply(self, computed: Gathered) -> dict[str, Any]:
        prompts = [
            {"index": index, "token_ids": row.token_ids, **self._distribution(row, computed)}
            for index, row in enumerate(self._rows)
        ]
        for prompt, score in zip(prompts, self._scores, strict=False):  # all of them, or none
            prompt["perplexity"] = perplexity(computed.tokens[score.request_id, 0])
        head = envelope(new_id("probs"), self._served.checkpoint)
        return {**head, "stage": self._body.stage, "prompts": prompts}

    def _distribution(self, row: OutputsRequest, computed: Gathered) -> dict[str, Any]:
        logits = computed.rows[row.request_id][0]
        if self._token_ids is None:
            summary = summarise(logits, top_k=self._top_k)
        else:
            summary = summarise(logits, token_ids=self._token_ids)
        return _summary_json(summary, self._served.checkpoint.tokenizer)


def _named(body: ProbsRequest, tokenizer: Tokenizer) -> list[int] | None:
    """The ids of the tokens that the body names, if it names any."""
    if body.tokens is None:
        return body.token_ids
    return [_single(text, tokenizer) for text in body.tokens]


def _single(text: str, tokenizer: Tokenizer) -> int:
    """The id of a text that is one token, or the name of a special one."""
    if text in tokenizer.special_tokens:
        return tokenizer.special_tokens[text]
    ids = encode_text(text, tokenizer, "tokens")
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
