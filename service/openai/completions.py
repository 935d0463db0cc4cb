"""The replies of /v1/completions, from those of /generate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.service.openai.envelope import head, usage, usage_member
from logitd.service.openai.logprobs import ShownTokens, completion_logprobs
from logitd.service.openai.schemas import CompletionRequest


@dataclass(slots=True)
class _Growing:
    """A choice so far."""

    tokens: ShownTokens
    remaining: int | None  # characters still to be shown, where that is limited


class CompletionFormat:
    """One request's replies. `prompts` are the token ids of each prompt.

    With `max_tokens` 0 the engine generated one token, because its generations have at least one;
    it is left out of text, lists and usage.
    """

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[Sequence[int]],
        checkpoint: CheckpointInfo,
    ) -> None:
        self._head = head("cmpl", "text_completion", checkpoint)
        self._tokenizer = checkpoint.tokenizer
        self._prompts = prompts
        self._body = body
        self._choices: dict[int, _Growing] = {}

    def reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(choice) for choice in reply["choices"]],
            "usage": self._usage(reply["usage"]),
        }

    def chunks(self, chunk: dict[str, Any], counts: dict[str, int]) -> Iterator[dict[str, Any]]:
        """A chunk for each choice that has something new: clients look at the first alone."""
        options = self._body.stream_options
        for native in chunk["choices"]:
            choice = self._choice(native)
            listed = choice["logprobs"] is not None and choice["logprobs"]["tokens"]
            if choice["text"] or listed or choice["finish_reason"]:
                told = usage_member(options, self._usage(counts))
                yield {**self._head, "choices": [choice], **told}
        if "usage" in chunk and options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage(chunk["usage"])}

    def _choice(self, native: dict[str, Any]) -> dict[str, Any]:
        """What is new of a choice."""
        index = native["index"]
        if index not in self._choices:
            self._choices[index] = self._begin(native["prompt_index"])
        growing, text, reason = self._choices[index], native["text"], native["finish_reason"]
        shown = growing.tokens.push(native)
        if growing.remaining is not None:
            text = text[: growing.remaining]
            growing.remaining -= len(text)
            reason = reason and "length"  # whatever the token that is left out was
        lists = None
        if self._body.logprobs is not None:
            lists = completion_logprobs(self._tokenizer, shown)
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": reason}

    def _begin(self, prompt_index: int) -> _Growing:
        prompt = self._prompts[prompt_index] if self._body.echo else ()
        if self._body.max_tokens == 0:
            tokens = ShownTokens(prompt_tokens=len(prompt), limit=len(prompt))
            return _Growing(tokens, remaining=len(self._tokenizer.decode(prompt)))
        return _Growing(ShownTokens(prompt_tokens=len(prompt)), remaining=None)

    def _usage(self, counts: dict[str, int]) -> dict[str, Any]:
        return usage(counts, none_generated=self._body.max_tokens == 0)
