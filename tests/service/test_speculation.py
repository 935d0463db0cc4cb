"""Speculation over HTTP: a server with drafts gives the same replies as one without. A step yields
several tokens, so stop strings, the ends of texts and token counts could differ."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.service.serving import Serving, serving
from tests.service.spelling import RING, spelled
from tests.service.twins import check_alike, check_streams_alike

KNOWN = [*RING, *RING[:1]]
"""A prompt of the spelling checkpoint from which every continuation can be drafted."""
LETTERS = [97, 98, 99]


@dataclass(frozen=True)
class Pair:
    """The same checkpoint served twice, with drafts and without."""

    drafting: Serving
    plain: Serving

    @property
    def accepted(self) -> float:
        return self.drafting.sample("logitd_draft_tokens_accepted_total")


def served_twice(checkpoint: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(
            *(
                stack.enter_context(serving(checkpoint, slots=4, speculate=speculate))
                for speculate in ("ngram", "none")
            )
        )


@pytest.fixture(scope="module")
def spellers(spelling_path: Path) -> Iterator[Pair]:
    yield from served_twice(spelling_path)


@pytest.fixture(scope="module")
def tiny(checkpoint_path: Path) -> Iterator[Pair]:
    yield from served_twice(checkpoint_path)


def check(pair: Pair, body: dict[str, Any], path: str = "/generate") -> Any:
    """Check that both servers give the same reply, with and without streaming, and return it."""
    check_streams_alike(pair.drafting, pair.plain, path, body)
    return check_alike(pair.drafting, pair.plain, path, body)


SPELLED: dict[str, dict[str, Any]] = {
    "to max_tokens": {"max_tokens": 90, "ignore_eos": True},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "to its end": {},
    "n": {"n": 3, "max_tokens": 50, "ignore_eos": True},
    "logprobs": {"logprobs": 2, "max_tokens": 50, "ignore_eos": True},
    "echo": {"echo": True, "logprobs": 1, "max_tokens": 40},
    "prompt_logprobs": {"prompt_logprobs": 1, "max_tokens": 20},
    "stop token": {"stop_token_ids": [ord("p")]},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.5, "max_tokens": 80},
    "held back": {"stop": ["xyz!", "éx"], "ignore_eos": True, "max_tokens": 70},
}


@pytest.mark.parametrize("name", SPELLED)
def test_repeating_text_is_the_same(spellers: Pair, name: str) -> None:
    before = spellers.accepted
    reply = check(spellers, {"prompt": KNOWN, "seed": 3, **SPELLED[name]})
    longest = max(len(choice["token_ids"]) for choice in reply["choices"])
    assert (spellers.accepted > before) == (longest > 2)


@pytest.mark.parametrize(
    "length", [pytest.param(n, marks=[pytest.mark.slow] * bool(n % 3)) for n in range(1, 24)]
)
def test_stop_string_anywhere_in_a_step_is_the_same(spellers: Pair, length: int) -> None:
    """Tokens after the stop string in the same step are neither shown nor counted."""
    before = spellers.drafting.finished("stop")
    ids = spelled("a", length + 1)
    stop = bytes(ids[-2:]).decode()
    body = {"prompt": KNOWN, "stop": stop, "ignore_eos": True, "logprobs": 0, "seed": 1}
    reply = check(spellers, body)
    (choice,) = reply["choices"]
    assert choice["token_ids"] == [token["id"] for token in choice["tokens"]] == ids
    assert choice["text"] == bytes(ids[:-2]).decode()
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert reply["usage"]["completion_tokens"] == len(ids)
    spellers.drafting.wait_idle()
    assert spellers.drafting.finished("stop") == before + 2


@pytest.mark.parametrize("max_tokens", range(4, 13))
def test_stop_string_in_the_last_step_is_the_same(spellers: Pair, max_tokens: int) -> None:
    """The step with the stop string may also reach max_tokens."""
    body = {"prompt": KNOWN, "stop": ["fg", "e"], "max_tokens": max_tokens, "seed": 1}
    (choice,) = check(spellers, body)["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("bcd", "e")
    assert choice["token_ids"] == list(b"bcde")


def test_some_drafts_are_accepted(tiny: Pair) -> None:
    drafted = tiny.drafting.sample("logitd_draft_tokens_total")
    body = {"prompt": "abc", "allowed_token_ids": LETTERS, "max_tokens": 100, "seed": 1, "n": 4}
    tiny.drafting.generate(**body)
    tiny.drafting.wait_idle()
    assert 0 < tiny.accepted < tiny.drafting.sample("logitd_draft_tokens_total")
    assert tiny.drafting.sample("logitd_draft_tokens_total") > drafted
    assert tiny.plain.sample("logitd_draft_tokens_total") == 0
