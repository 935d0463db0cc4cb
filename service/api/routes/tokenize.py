"""POST /tokenize, POST /detokenize and GET /tokenizer_info: the vocabulary, without the model.

Texts become ids with their bytes and offsets, ids become text; nothing is computed or queued. The
replies are also what evaluation programs with a "remote tokenizer" read. Texts may be longer than
the model's context; the limits are those of a body and of a reply.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from logitd.model.text.tokenizer import NO_VOCABULARY, Tokenizer, TokenizerError
from logitd.service.api.requests.body import body_of, described_by, unless_gone
from logitd.service.api.requests.encode import THREAD_CHARACTERS, encode_text
from logitd.service.api.responses.text import checkpoint_name, envelope, token_json
from logitd.service.core.errors import ERRORS, bad_request
from logitd.service.core.ids import new_id
from logitd.service.core.models import Served
from logitd.service.core.state import Chosen, Ready, ServiceState, State
from logitd.service.schemas.tokenizer import (
    MAX_PIECES,
    DetokenizeListReply,
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeListReply,
    TokenizeReply,
    TokenizeRequest,
    TokenizerInfo,
)

router = APIRouter(tags=["vocabulary"])

# Nothing waits here: neither for room in a queue nor for a deadline.
RESPONSES = {status: error for status, error in ERRORS.items() if status not in (429, 504)}

TokenizeBody = Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest))]
DetokenizeBody = Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest))]


@router.post(
    "/tokenize",
    response_model=TokenizeReply | TokenizeListReply,
    responses=RESPONSES,
    openapi_extra=described_by(TokenizeRequest),
    summary="Texts to token ids",
)
async def tokenize(body: TokenizeBody, models: Ready, state: State, request: Request) -> Response:
    """The ids of a text; and `pieces`, each token with its bytes and the characters [start, end) of
    the text that it touches. Of a list of texts the same, one by one, in `prompts`."""
    served = models.of(body.model)
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    work = _in_thread(state, sum(map(len, texts)), lambda: _tokenized(body, texts, served))
    return Response(await unless_gone(request, work), media_type="application/json")


@router.post(
    "/detokenize",
    response_model=DetokenizeReply | DetokenizeListReply,
    responses=RESPONSES,
    openapi_extra=described_by(DetokenizeRequest),
    summary="Token ids to text",
)
async def detokenize(
    body: DetokenizeBody, models: Ready, state: State, request: Request
) -> Response:
    """The text of ids and its bytes, which are the truth where they are not UTF-8. Of a list of
    lists the same, one by one, in `prompts`."""
    served = models.of(body.model)
    nested = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: Any = body.tokens if nested else [body.tokens]
    work = _in_thread(state, sum(map(len, lists)), lambda: _detokenized(lists, nested, served))
    return Response(await unless_gone(request, work), media_type="application/json")


@router.get(
    "/tokenizer_info",
    responses={401: ERRORS[401], 404: ERRORS[404], 431: ERRORS[431], 503: ERRORS[503]},
    summary="The vocabulary",
)
def tokenizer_info(served: Chosen) -> TokenizerInfo:
    """Its size, its special tokens and the pattern that cuts texts. A vocabulary without an
    end-of-text token has null for `eos_token`."""
    checkpoint, tokenizer = served.checkpoint, served.checkpoint.tokenizer
    eos, template = tokenizer.end_of_text, checkpoint.chat_template
    return TokenizerInfo.model_validate(
        {
            "model": checkpoint.name,
            "checkpoint": checkpoint_name(checkpoint),
            "vocab_size": tokenizer.vocab_size,
            "kind": tokenizer.kind,
            "eos_token": None if eos is None else tokenizer.token_text(eos),
            "eos_token_id": eos,
            "bos_token": None,
            "pad_token": None,
            "chat_template": None if template is None else template.source,
            "pattern": tokenizer.pattern,
            "special_tokens": tokenizer.special_tokens,
        }
    )


async def _in_thread(state: ServiceState, size: int, work: Callable[[], bytes]) -> bytes:
    """Do `work` off the event loop. Long texts are done one at a time: for a moment it takes
    memory many times its size, and other endpoints need threads too."""
    if size <= THREAD_CHARACTERS:
        return await asyncio.to_thread(work)
    async with state.long_texts:
        return await asyncio.to_thread(work)


def _tokenized(body: TokenizeRequest, texts: Sequence[str], served: Served) -> bytes:
    """The JSON of a TokenizeReply or TokenizeListReply."""
    tokenizer = served.checkpoint.tokenizer
    special_ids = body.special_tokens == "ids"
    encoded = [encode_text(text, tokenizer, special_ids=special_ids) for text in texts]
    count = sum(map(len, encoded))
    if body.pieces and count > MAX_PIECES:
        raise bad_request(
            f"the text has {count} tokens; at most {MAX_PIECES} are described one by one in a "
            "reply. Leave pieces out, or send less text",
            "pieces",
        )
    described = count <= MAX_PIECES if body.pieces is None else body.pieces
    results = [
        {
            "tokens": ids,
            "count": len(ids),
            "pieces": _pieces(ids, text, tokenizer) if described else None,
        }
        for ids, text in zip(encoded, texts, strict=True)
    ]
    return _reply(results, served, many=not isinstance(body.prompt, str))


def _pieces(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [
        {
            **token_json(tokenizer, token_id),
            "start": span.start,
            "end": span.end,
            "special": tokenizer.is_special(token_id),
        }
        for token_id, span in zip(ids, tokenizer.spans(ids, text), strict=True)
    ]


def _detokenized(lists: Sequence[Sequence[int]], nested: bool, served: Served) -> bytes:
    """The JSON of a DetokenizeReply or DetokenizeListReply."""
    tokenizer, limit = served.checkpoint.tokenizer, served.settings.max_body_bytes
    if not tokenizer.has_text:
        raise bad_request(f"the ids have no text: {NO_VOCABULARY}", "tokens", "no_vocabulary")
    try:
        size = sum(len(tokenizer.token_bytes(token_id)) for ids in lists for token_id in ids)
    except TokenizerError as error:
        raise bad_request(str(error), "tokens") from error
    if size > limit:
        raise bad_request(
            f"the text of these ids has {size} bytes; {limit} are allowed. Send fewer ids, or "
            "raise --max-body-bytes",
            "tokens",
        )
    results = []
    for ids in lists:
        raw = tokenizer.decode_bytes(ids)
        results.append({"prompt": raw.decode("utf-8", errors="replace"), "bytes": list(raw)})
    return _reply(results, served, many=nested)


def _reply(results: Sequence[dict[str, Any]], served: Served, *, many: bool) -> bytes:
    """One result with the reply's head around it, or several as its `prompts`."""
    head = envelope(new_id("tokens"), served.checkpoint)
    if not many:
        return orjson.dumps({**head, **results[0]})
    prompts = [{"index": index, **result} for index, result in enumerate(results)]
    return orjson.dumps({**head, "prompts": prompts})
