"""Completions: translates replies of /generate into replies of /v1/completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.service.openai.envelope import head, last_chunk, named_seed, usage, usage_member
from logitd.service.openai.logprobs import ShownTokens, completion_logprobs
from logitd.service.openai.schemas import CompletionRequest


class CompletionFormat:
    """Formats the replies to one request. `prompts` are the token ids of each prompt."""

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[Sequence[int]],
        model: str,
        checkpoint: CheckpointInfo,
    ) -> None:
        self._head = head("cmpl", "text_completion", model, checkpoint)
        self._tokenizer = checkpoint.tokenizer
        self._prompts = prompts
        self._body = body
        self._tokens: dict[int, ShownTokens] = {}  # by choice

    def reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(choice) for choice in reply["choices"]],
            "usage": usage(reply["usage"]),
        }

    def chunks(self, chunk: dict[str, Any], counts: dict[str, int]) -> Iterator[dict[str, Any]]:
        """A chunk for each choice that has new text or tokens, because clients read only the first
        choice of a chunk."""
        options = self._body.stream_options
        for native in chunk["choices"]:
            choice = self._choice(native)
            listed = choice["logprobs"] is not None and choice["logprobs"]["tokens"]
            if choice["text"] or listed or choice["finish_reason"]:
                yield {**self._head, "choices": [choice], **usage_member(options, counts)}
        yield from last_chunk(self._head, options, chunk)

    def _choice(self, native: dict[str, Any]) -> dict[str, Any]:
        index = native["index"]
        if index not in self._tokens:
            prompt = self._prompts[native["prompt_index"]] if self._body.echo else ()
            self._tokens[index] = ShownTokens(prompt_tokens=len(prompt))
        shown = self._tokens[index].push(native)
        lists = None
        if self._body.logprobs is not None:
            lists = completion_logprobs(self._tokenizer, shown)
        return {
            "index": index,
            "text": native["text"],
            "logprobs": lists,
            "finish_reason": native["finish_reason"],
            "seed": named_seed(self._body.seed, native["seed"]),
        }
