"""Logprobs: translates logprobs of /generate into OpenAI's format.

A token's name is its text. Names must be unique, because clients look up logprobs by name. So three
kinds of tokens have a name such as `bytes:\\xe2\\x82`: tokens whose bytes are not UTF-8, special
tokens with the text of an ordinary token, and tokens whose text looks like such a name. An id
without bytes has a name such as `token_id:100256`.

A token is listed as soon as the shown text reaches it, so a stream's lists and text grow together.
If a stop string cut the text, the tokens that begin after the cut are not listed, and the token at
the cut is listed whole. A token's offset is the number of characters that are complete before it,
so all tokens of one character have the same offset.

Logprobs are the engine's values, in float64. The logprobs of generated tokens are finite: a
sequence whose logits are not finite ends with an error, and tokens that the filters of `processed`
drop are not listed.
"""

import codecs
from dataclasses import dataclass
from typing import Any

from logitd.model.text.tokenizer import Tokenizer

SPELLED = ("bytes:", "token_id:")


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The unique name of a token."""
    raw = tokenizer.token_bytes(token_id)
    if not raw:
        return f"token_id:{token_id}"
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = ""
    if text and not text.startswith(SPELLED) and tokenizer.ranks.get(raw, token_id) == token_id:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token of a native reply, and the offset in the text at which it begins."""

    token: dict[str, Any]
    offset: int


class ShownTokens:
    """Collects the tokens of one choice and returns each when the choice's text reaches it.

    prompt_tokens  number of leading tokens that echo the prompt. The tokens after them are decoded
                   separately, so no character continues across the end of the prompt
    """

    def __init__(self, *, prompt_tokens: int = 0) -> None:
        self._prompt_tokens = prompt_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._seen = 0  # number of tokens so far
        self._whole = 0  # number of characters that these tokens complete
        self._shown = 0  # number of characters of the shown text
        self._held: list[PlacedToken] = []

    def push(self, choice: dict[str, Any]) -> list[PlacedToken]:
        """Add the new part of a native choice. Returns the tokens that its text now reaches."""
        self._held += [self._placed(token) for token in choice.get("tokens", ())]
        self._shown += len(choice["text"])
        if choice["finish_reason"] is None:
            return self._take(self._reached())
        if isinstance(choice["stop_reason"], str):  # a stop string cut the text
            return self._take(self._reached())
        if choice["stop_reason"] is not None and self._held:  # a stop token has no text
            self._held[-1] = PlacedToken(self._held[-1].token, self._shown)
        return self._take(len(self._held))

    def _placed(self, token: dict[str, Any]) -> PlacedToken:
        if self._seen == self._prompt_tokens:
            self._whole += len(self._decoder.decode(b"", final=True))
        placed = PlacedToken(token, self._whole)
        self._seen += 1
        self._whole += len(self._decoder.decode(bytes(token["bytes"])))
        return placed

    def _reached(self) -> int:
        """Number of collected tokens that begin in the shown text. A token without bytes is counted
        as soon as all tokens before it are."""
        count = 0
        for held in self._held:
            if held.offset >= self._shown and held.token["bytes"]:
                break
            count += 1
        return count

    def _take(self, count: int) -> list[PlacedToken]:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def completion_logprobs(tokenizer: Tokenizer, placed: list[PlacedToken]) -> dict[str, Any]:
    """The four lists of /v1/completions. The top logprobs always include the token itself, with the
    same value as in `token_logprobs`."""
    tokens, values, tops, offsets = [], [], [], []
    for shown in placed:
        name, value = token_name(tokenizer, shown.token["id"]), shown.token["logprob"]
        top = {token_name(tokenizer, t["id"]): t["logprob"] for t in shown.token["top"]}
        tokens.append(name)
        values.append(value)
        tops.append(None if value is None else {**top, name: value})
        offsets.append(shown.offset)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, placed: list[PlacedToken]) -> dict[str, Any]:
    content = [
        {
            **_named(tokenizer, shown.token),
            "top_logprobs": [_named(tokenizer, top) for top in shown.token["top"]],
        }
        for shown in placed
    ]
    return {"content": content, "refusal": None}


def _named(tokenizer: Tokenizer, token: dict[str, Any]) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token["id"]),
        "logprob": token["logprob"],
        "bytes": token["bytes"],
    }
