"""Completions: the texts of a generation, which grow while the engine generates tokens.

A `Completion` is one choice of a reply. `GrowingReply` has all choices of a request, ends those
that reach a stop string, and returns what was added to each choice since the last call. `LLM` and
the HTTP service both use it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from logitd.model.inference.engine.events import (
    Event,
    FinishEvent,
    FinishReason,
    PromptEvent,
    TokenEvent,
)
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.results import ScoredToken
from logitd.model.operations.operation import Completions
from logitd.model.operations.tokens import first_likeliest, scored_json
from logitd.model.text.growing_text import GrowingText
from logitd.model.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Piece:
    """The text and tokens that were added to a choice since its previous piece.

    seed           the seed of the prompt
    tokens         the tokens with their logprobs, if the request asks for logprobs
    finish_reason  "stop" or "length" in the last piece
    stop_reason    the stop string, or the id of the stop token, that ended the text
    """

    index: int
    prompt_index: int
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[ScoredToken | TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def to_json(self, tokenizer: Tokenizer) -> dict[str, Any]:
        tokens = [scored_json(tokenizer, token) for token in self.tokens]
        return {
            "index": self.index,
            "prompt_index": self.prompt_index,
            "text": self.text,
            "token_ids": self.token_ids,
            "seed": self.seed,
            **({"tokens": tokens} if tokens else {}),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


class Completion:
    """One choice while it is generated. Decodes its tokens to text.

    `token_ids` includes a stop token, but the text does not. A stop string is not in the text
    either; the token that completes it is the last of `token_ids`. If `max_tokens` is reached
    within a character, the text ends before that character. With `echo`, text, ids and tokens begin
    with the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        index: int,
        prompt_index: int,
        params: SamplingParams,
        stop: Sequence[str],
        echo: Sequence[int] = (),
    ) -> None:
        self.generated = 0
        self.finished = False
        self._growing = GrowingText(
            tokenizer,
            stop_token_ids=params.stop_token_ids,
            stop=stop,
            min_tokens=params.min_tokens,
        )
        self._has_stop = bool(stop)
        self._undecoded: list[int] = []  # tokens of the new piece that are not in its text yet
        self._new = Piece(index, prompt_index, params.seed, tokenizer.decode(echo), list(echo))

    def push(self, event: TokenEvent) -> bool:
        """Add a token. Returns True if it completed a stop string, so that the caller can end the
        sequence."""
        if self.finished:
            return False
        new = self._new
        self.generated += 1
        new.token_ids.append(event.token_id)
        if event.chosen is not None:
            new.tokens.append(event)
        self._undecoded.append(event.token_id)
        if not self._has_stop:  # tokens that arrive together are decoded together
            return False
        self._decode()
        return self._stopped()

    def push_prompt(self, tokens: Iterable[ScoredToken]) -> None:
        self._new.tokens += tokens

    def finish(self, event: FinishEvent) -> None:
        """Add the engine's final event, which must not be an error."""
        if self.finished:
            return
        self._decode()
        cut = event.reason is not FinishReason.STOP
        self._new.text += self._growing.finish(cut=cut)
        if not self._stopped():
            self._end("length" if cut else "stop", event.stop_token_id)

    def take(self) -> Piece | None:
        """The text and tokens added since the last call; None if there are none."""
        self._decode()
        new = self._new
        if not (new.text or new.token_ids or new.finish_reason):
            return None
        self._new = Piece(new.index, new.prompt_index, new.seed, stop_reason=new.stop_reason)
        return new

    def _decode(self) -> None:
        if self._undecoded:
            self._new.text += self._growing.push(*self._undecoded)
            self._undecoded.clear()

    def _stopped(self) -> bool:
        """End the completion if its text has reached a stop string."""
        if self._growing.stopped_by is None:
            return False
        self._end("stop", self._growing.stopped_by)
        return True

    def _end(self, reason: str, stop_reason: str | int | None) -> None:
        self.finished = True
        self._new.finish_reason, self._new.stop_reason = reason, stop_reason


class GrowingReply:
    """The choices of one request, and the logprobs of its prompts."""

    def __init__(self, plan: Completions, tokenizer: Tokenizer) -> None:
        self.finishes: list[FinishEvent] = []
        self.prompt_tokens = sum(len(request.token_ids) for request in plan.requests)
        self._plan = plan
        self._tokenizer = tokenizer
        self._completions = {
            (request.request_id, index): Completion(
                tokenizer,
                index=prompt_index * plan.n + index,
                prompt_index=prompt_index,
                params=request.params,
                stop=plan.stop,
                echo=request.token_ids if plan.echo else (),
            )
            for prompt_index, request in enumerate(plan.requests)
            for index in range(plan.n)
        }
        self._prompts = {request.request_id: index for index, request in enumerate(plan.requests)}
        self._scores: dict[int, list[ScoredToken]] = {}  # since the last `take_json`, by prompt

    @property
    def seed(self) -> int | None:
        """The seed of all prompts; None if the prompts have different seeds."""
        seeds = {request.params.seed for request in self._plan.requests}
        return seeds.pop() if len(seeds) == 1 else None

    @property
    def generated(self) -> int:
        return sum(completion.generated for completion in self._completions.values())

    def push(self, event: Event) -> bool:
        """Add an event. Returns True if its sequence has reached a stop string; the caller then
        aborts the sequence. The caller must check a FinishEvent for errors before adding it, unless
        the event's choice `is_finished`."""
        if isinstance(event, TokenEvent):
            return self._completions[event.request_id, event.index].push(event)
        if isinstance(event, PromptEvent):
            self._score(event)
        elif isinstance(event, FinishEvent):
            self.finishes.append(event)
            self._completions[event.request_id, event.index].finish(event)
        return False

    def is_finished(self, event: FinishEvent) -> bool:
        """True if the choice that an event belongs to has already ended."""
        return self._completions[event.request_id, event.index].finished

    def take(self) -> list[Piece]:
        pieces = (completion.take() for completion in self._completions.values())
        return [piece for piece in pieces if piece is not None]

    def take_json(self) -> dict[str, Any]:
        """Text and tokens added since the last call, as the members `choices` and, with prompt
        logprobs, `prompts`."""
        choices = [piece.to_json(self._tokenizer) for piece in self.take()]
        scores, self._scores = self._scores, {}
        if not scores:
            return {"choices": choices}
        prompts = [
            {
                "index": index,
                "tokens": [scored_json(self._tokenizer, token) for token in scores[index]],
            }
            for index in sorted(scores)
        ]
        return {"choices": choices, "prompts": prompts}

    def usage(self) -> dict[str, int]:
        """The token counts after the last event. Each prompt counts once."""
        first = [event for event in self.finishes if event.counts_prompt]
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt_tokens + self.generated,
            "cached_tokens": sum(event.cached_tokens for event in first),
        }

    def _score(self, event: PromptEvent) -> None:
        plan, prompt_index = self._plan, self._prompts[event.request_id]
        if plan.prompt_logprobs is not None:
            tokens = [first_likeliest(token, plan.prompt_logprobs) for token in event.tokens]
            self._scores.setdefault(prompt_index, []).extend(tokens)
        if plan.echo and plan.logprobs is not None:
            tokens = [first_likeliest(token, plan.logprobs) for token in event.tokens]
            for index in range(plan.n):
                self._completions[event.request_id, index].push_prompt(tokens)
