"""Tokens and their logprobs as OpenAI writes them, from those of /generate.

Tokens are named by their text. A name must tell one token from every other, because logprobs are
looked up by it: bytes that are not UTF-8, a special token that reads like an ordinary one, and a
text that reads like such a name are `bytes:\\xe2\\x82`; an id without bytes is `token_id:100256`.

Which tokens belong to a text. A token is listed as soon as the text that is shown reaches it, so
lists and text of a stream grow together. Where a stop string cut the text, the tokens that begin
behind the cut are not listed, and the one that the cut goes through is listed whole. A token's
offset is the number of characters that were complete before it: the tokens of one character have
the same offset.

Values are the engine's, in float64. Those of generated tokens are finite: a sequence whose logits
are not ends with an error instead, and what the filters of `processed` drop is in no list.
"""

import codecs
from dataclasses import dataclass
from typing import Any

from logitd.model.text.tokenizer import Tokenizer

SPELLED = ("bytes:", "token_id:")


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The name of a token; no two ids have the same."""
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
    """A token of a native reply, with the offset in the text where it begins."""

    token: dict[str, Any]
    offset: int


class ShownTokens:
    """The tokens of one choice, handed out as its text shows them.

    prompt_tokens  leading tokens that are an echo; the text after them is decoded anew
    """

    def __init__(self, *, prompt_tokens: int = 0) -> None:
        self._prompt_tokens = prompt_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._seen = 0  # tokens
        self._whole = 0  # characters that the tokens seen have completed
        self._shown = 0  # characters of the text so far
        self._held: list[PlacedToken] = []

    def push(self, choice: dict[str, Any]) -> list[PlacedToken]:
        """Take in what is new of a native choice; the tokens that its text now shows."""
        self._held += [self._placed(token) for token in choice.get("tokens", ())]
        self._shown += len(choice["text"])
        if choice["finish_reason"] is None:
            return self._take(self._reached())
        if isinstance(choice["stop_reason"], str):  # cut: what lies behind is not shown at all
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
        """How many of the tokens that are held begin in the text shown. Before a token without
        text there is nothing to wait for."""
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
    """The four lists of /v1/completions. The token itself is always among the likeliest, and its
    value there is the same double as in `token_logprobs`."""
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
    """The member `logprobs` of a choice of /v1/chat/completions."""
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
