"""Chunks of /v1/completions from native chunks that a server does not produce on demand; the rest
is tested through the route.
"""

from pathlib import Path
from typing import Any

from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.service.openai.completions import CompletionFormat
from logitd.service.openai.schemas import CompletionRequest

COUNTS = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def choice(text: str, reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return {
        "index": index,
        "prompt_index": 0,
        "text": text,
        "token_ids": [97],
        "seed": 1,
        "finish_reason": reason,
        "stop_reason": None,
    }


def test_choice_that_says_nothing_new_gets_no_chunk(checkpoint_path: Path) -> None:
    """A native chunk may have ids but no text: for half a character, or for text that may begin a
    stop string."""
    body = CompletionRequest(prompt="a", n=2, stream=True, logprobs=1)
    written = CompletionFormat(body, [(97,)], "mine", read_checkpoint(checkpoint_path))
    held = {"choices": [choice(""), choice("", index=1)]}
    assert list(written.chunks(held, COUNTS)) == []
    told = list(written.chunks({"choices": [choice("", index=1), choice("b")]}, COUNTS))
    assert [part["choices"][0]["text"] for part in told] == ["b"]
    (last,) = written.chunks({"choices": [choice("", "length", index=1)]}, COUNTS)
    assert last["choices"][0]["finish_reason"] == "length"
    end = {"choices": [], "usage": COUNTS | {"cached_tokens": 0}}
    assert list(written.chunks(end, COUNTS)) == [], "the usage was not requested"
