"""The replies of TGI's endpoints, from those of /generate: whole ones, and one event a token.

Each token's text is what of the generated text it completes, so together they are all of it. A
token is told when the next is known, or the end: the event of the last one also says how it ended.
"""

from collections.abc import Iterator
from typing import Any

from logitd.model.text.tokenizer import Tokenizer
from logitd.service.api.openai.logprobs import PlacedToken, ShownTokens
from logitd.service.api.responses import sse
from logitd.service.core.errors import ApiError
from logitd.service.schemas.tgi import TextGenerationParameters, TextGenerationRequest


def error_event(error: ApiError) -> dict[str, Any]:
    """An error after the first byte, as TGI's clients read it."""
    return {"error": error.message, "error_type": error.type}


EVENTS = sse.Wire(sse.MEDIA_TYPE, sse.event, sse.KEEP_ALIVE, b"", error_event)
"""Events that end without `[DONE]`."""


class TgiFormat:
    """One request's replies. `listed`: the whole reply is in a list, as POST / gives it."""

    def __init__(
        self, body: TextGenerationRequest, tokenizer: Tokenizer, seed: int, *, listed: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._parameters = body.parameters or TextGenerationParameters()
        self._prefix = body.inputs if self._parameters.return_full_text else ""
        self._seed = seed
        self._listed = listed
        self._shown = ShownTokens()
        self._pending: list[PlacedToken] = []
        self._text = ""
        self._sent = 0  # characters that were told as texts of tokens
        self._index = 0

    def reply(self, reply: dict[str, Any]) -> Any:
        (native,) = reply["choices"]
        told: dict[str, Any] = {"generated_text": self._prefix + native["text"]}
        if self._parameters.details:
            tokens = list(self._new(native))
            told["details"] = {
                **self._details(native, reply["usage"]["completion_tokens"]),
                "prefill": [],
                "tokens": [self._token(placed, text) for placed, text in tokens],
            }
            if self._parameters.top_n_tokens:
                told["details"]["top_tokens"] = [self._top(placed) for placed, _ in tokens]
        return [told] if self._listed else told

    def chunks(self, chunk: dict[str, Any], counts: dict[str, int]) -> Iterator[dict[str, Any]]:
        """An event for each token whose text is known."""
        for native in chunk["choices"]:
            new = list(self._new(native))
            ended = native["finish_reason"] is not None
            for number, (placed, text) in enumerate(new, start=1):
                last = ended and number == len(new)
                self._index += 1
                event: dict[str, Any] = {"index": self._index, "token": self._token(placed, text)}
                if self._parameters.top_n_tokens:
                    event["top_tokens"] = self._top(placed)
                yield {
                    **event,
                    "generated_text": self._prefix + self._text if last else None,
                    "details": self._details(native, counts["completion_tokens"]) if last else None,
                }

    def _new(self, native: dict[str, Any]) -> Iterator[tuple[PlacedToken, str]]:
        """The tokens whose texts are known by now; at the end one at least."""
        shown = self._shown.push(native)
        self._pending += shown
        self._text += native["text"]
        ended = native["finish_reason"] is not None
        if ended and not self._pending:  # all that is left of a text that a stop string cut
            last = native.get("tokens", ())[-1:]
            self._pending = [PlacedToken(token, len(self._text)) for token in last]
        if not self._pending:  # a character has begun that no token has completed; or none
            return
        ends = [placed.offset for placed in self._pending[1:]] + [len(self._text)]
        count = len(self._pending) if ended else len(self._pending) - 1
        told = list(zip(self._pending, ends, strict=True))[:count]
        self._pending = self._pending[len(told) :]
        for placed, end in told:
            text = self._text[self._sent : end]
            self._sent = max(self._sent, end)
            yield placed, text

    def _details(self, native: dict[str, Any], generated: int) -> dict[str, Any]:
        reason = "length"
        if native["finish_reason"] == "stop":
            reason = "stop_sequence" if isinstance(native["stop_reason"], str) else "eos_token"
        return {"finish_reason": reason, "generated_tokens": generated, "seed": self._seed}

    def _token(self, placed: PlacedToken, text: str) -> dict[str, Any]:
        return {**self._named(placed.token), "text": text}

    def _top(self, placed: PlacedToken) -> list[dict[str, Any]]:
        return [self._named(token) for token in placed.token["top"]]

    def _named(self, token: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": token["id"],
            "text": token["text"],
            "logprob": token["logprob"],
            "special": token["id"] in self._tokenizer.special_tokens.values(),
        }
