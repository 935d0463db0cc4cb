"""Replies: from token events to the JSON that a client gets.

`Completion` is one choice of a generation: it turns ids into text, finds stop strings, counts, and
gives what is new since the last look. The rest are the small dicts that replies share.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.inference.engine.events import FinishEvent, FinishReason, PromptToken, TokenEvent
from logitd.model.inference.sampling.params import TokenLogprob
from logitd.model.text.growing_text import GrowingText
from logitd.model.text.tokenizer import Tokenizer
from logitd.service.engine.usage import Usage

CHECKPOINT_HEADERS = tuple(
    f"X-Logitd-{name}" for name in ("Name", "Step", "Val-Loss", "Weights-Sha256")
)
"""The headers of a reply whose body is not JSON."""
HEADER_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


def envelope(reply_id: str, checkpoint: CheckpointInfo) -> dict[str, Any]:
    """What every reply begins with: who answers, with which weights."""
    return {
        "id": reply_id,
        "created": int(time.time()),
        "model": checkpoint.name,
        "checkpoint": checkpoint_name(checkpoint),
    }


def checkpoint_name(checkpoint: CheckpointInfo) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "step": checkpoint.training.step,
        "val_loss": checkpoint.training.val_loss,
        "weights_sha256": checkpoint.weights_sha256,
    }


def checkpoint_headers(checkpoint: CheckpointInfo) -> dict[str, str]:
    """The same for replies whose body is not JSON. What is null has no header; what a header cannot
    hold (a directory may have any name) is percent-encoded."""
    return {
        f"X-Logitd-{name.replace('_', '-').title()}": quote(str(value), safe=HEADER_SAFE)
        for name, value in checkpoint_name(checkpoint).items()
        if value is not None
    }


def token_json(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """An id with its text for people and its bytes for machines."""
    return {
        "id": token_id,
        "text": tokenizer.token_text(token_id),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def logprob_json(tokenizer: Tokenizer, token: TokenLogprob) -> dict[str, Any]:
    return {
        **token_json(tokenizer, token.token_id),
        "logprob": token.logprob,
        "rank": token.rank,
    }


def scored_json(tokenizer: Tokenizer, token: PromptToken | TokenEvent) -> dict[str, Any]:
    """A token with its logprob and the likeliest in its place; null where nothing predicts it."""
    chosen = token.chosen
    return {
        **token_json(tokenizer, token.token_id),
        "logprob": None if chosen is None else chosen.logprob,
        "rank": None if chosen is None else chosen.rank,
        "top": [logprob_json(tokenizer, likely) for likely in token.top],
    }


def first_likeliest(token: PromptToken, count: int) -> PromptToken:
    """A token with the `count` likeliest in its place: the engine computed the most asked for."""
    return PromptToken(token.token_id, token.chosen, token.top[:count])


class Completion:
    """One choice on its way from tokens to text.

    A stop token is among `token_ids` and not in the text. A stop text is not in the text; the token
    that completes it is the last of `token_ids`. With `echo` all three begin with the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        index: int,
        prompt_index: int,
        stop: Sequence[str],
        stop_token_ids: frozenset[int],
        echo: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.generated = 0
        self.finished = False
        self._tokenizer = tokenizer
        self._growing = GrowingText(tokenizer, stop_token_ids=stop_token_ids, stop=stop)
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        # What the next `take` gives.
        self._text = tokenizer.decode(echo)
        self._token_ids = list(echo)
        self._tokens: list[dict[str, Any]] = []

    def push(self, event: TokenEvent) -> bool:
        """Take in a token. True when it completed a stop text: the sequence need not go on."""
        if self.finished:
            return False
        self.generated += 1
        self._token_ids.append(event.token_id)
        if event.chosen is not None:
            self._tokens.append(scored_json(self._tokenizer, event))
        self._text += self._growing.push(event.token_id)
        return self._stopped()

    def push_prompt(self, tokens: Iterable[PromptToken]) -> None:
        """Take in logprobs of the prompt that is echoed."""
        self._tokens += [scored_json(self._tokenizer, token) for token in tokens]

    def finish(self, event: FinishEvent) -> None:
        """The engine ended the sequence, with an answer."""
        if self.finished:
            return
        self._text += self._growing.finish()
        if self._stopped():
            return
        reason = "stop" if event.reason is FinishReason.STOP else "length"
        self._end(reason, event.stop_token_id)

    def take(self) -> dict[str, Any] | None:
        """The choice's JSON with what is new since the last call; None when nothing is."""
        if not (self._text or self._token_ids or self._finish_reason):
            return None
        choice: dict[str, Any] = {
            "index": self.index,
            "prompt_index": self.prompt_index,
            "text": self._text,
            "token_ids": self._token_ids,
        }
        if self._tokens:
            choice["tokens"] = self._tokens
        choice["finish_reason"] = self._finish_reason
        choice["stop_reason"] = self._stop_reason
        self._text, self._token_ids, self._tokens, self._finish_reason = "", [], [], None
        return choice

    def _stopped(self) -> bool:
        """Whether a stop text has ended the completion just now."""
        if self._growing.stopped_by is None:
            return False
        self._end("stop", self._growing.stopped_by)
        return True

    def _end(self, reason: str, stop_reason: str | int | None) -> None:
        self.finished = True
        self._finish_reason, self._stop_reason = reason, stop_reason


def usage(finishes: Iterable[FinishEvent], completion_tokens: int) -> dict[str, int]:
    """Token counts of a request: each prompt once, whatever its n."""
    first = [event for event in finishes if event.index == 0]
    prompt_tokens = sum(event.prompt_tokens for event in first)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "cached_tokens": sum(event.cached_tokens for event in first),
    }


def timings(finishes: Sequence[FinishEvent], completion_tokens: int) -> dict[str, float]:
    """Where a request's time went, over all its sequences: from the first arrival to the first
    admission, to the first computed prompt, to the last end."""
    spent = _usage(finishes)
    phases = spent.milliseconds()
    decoding = phases["decode"] / 1e3
    return {
        **{f"{phase}_ms": took for phase, took in phases.items()},
        "ttft_ms": phases["queue"] + phases["prefill"],
        "tokens_per_second": completion_tokens / decoding if decoding > 0 else 0.0,
    }


def server_timing(finishes: Sequence[FinishEvent]) -> dict[str, str]:
    """The same phases as a header, which the developer tools of browsers draw. Milliseconds."""
    spent = _usage(finishes).milliseconds().items()
    phases = (f"{phase};dur={took:.3f}" for phase, took in spent)
    return {"Server-Timing": ", ".join(phases)}


def _usage(finishes: Sequence[FinishEvent]) -> Usage:
    spent = Usage()
    for event in finishes:
        spent.add(event)
    return spent
