"""POST /score: logprobs compared with the model's plain forward pass, and totals compared with sums
of the logprobs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.operations.score import ScoreReply
from logitd.model.transformer.gpt import GPT
from tests.service.http.asking import PROMPT
from tests.service.serving import Serving


def score(server: Serving, prompt: Any = PROMPT, **fields: Any) -> ScoreReply:
    return ScoreReply.model_validate(server.json("/score", {"prompt": prompt, **fields}))


def plain(gpt: GPT, text: str) -> Tensor:
    """Logprobs (T, V) of the plain forward pass."""
    return gpt(torch.tensor([list(text.encode())])).logits[0].double().log_softmax(dim=-1)


def test_whole_text_can_be_scored(server: Serving, gpt: GPT) -> None:
    (prompt,) = score(server, logprobs=2).prompts
    assert prompt.continuations is None
    found = prompt.score
    assert found is not None
    assert found.tokens is not None
    ids, rows = list(PROMPT.encode()), plain(gpt, PROMPT)
    expected = [rows[i - 1, ids[i]].item() for i in range(1, len(ids))]
    assert prompt.token_ids == found.token_ids == ids
    assert found.scored_tokens == len(ids) - 1
    assert found.tokens[0].logprob is None
    assert [t.logprob for t in found.tokens[1:]] == pytest.approx(expected, abs=1e-3)
    assert [len(t.top) for t in found.tokens[1:]] == [2] * (len(ids) - 1)
    assert found.logprob == math.fsum(t.logprob or 0 for t in found.tokens)
    mean = found.logprob / found.scored_tokens
    assert found.perplexity == pytest.approx(math.exp(-mean))
    assert found.bits_per_byte == pytest.approx(-mean / math.log(2))  # every token is a byte


def test_special_tokens_have_no_bytes(server: Serving) -> None:
    """As in `logitd eval` and the trainer's validation, whose bits per byte are the same number."""
    end = 256
    texts = [[ord("a"), end], [end]]
    (prompt,) = score(server, continuations=texts).prompts
    assert prompt.continuations is not None
    both, only_special = prompt.continuations
    assert both.bits_per_byte == pytest.approx(-both.logprob / math.log(2))
    assert only_special.bits_per_byte is None


def test_continuations_equal_the_models_logprobs(server: Serving, gpt: GPT) -> None:
    given = [" and", "x", " more than one token"]
    prompt_text = PROMPT.replace("A prompt", "A fresh prompt, one that nobody computed before,")
    assert len(prompt_text) // 32 == 3
    reply = score(server, prompt_text, continuations=given, logprobs=0)
    (prompt,) = reply.prompts
    assert prompt.score is None
    assert prompt.continuations is not None
    for index, (text, found) in enumerate(zip(given, prompt.continuations, strict=True)):
        rows = plain(gpt, prompt_text + text)[len(prompt_text) - 1 :]
        expected = [rows[i, byte].item() for i, byte in enumerate(text.encode())]
        assert found.index == index
        assert found.token_ids == list(text.encode())
        assert found.tokens is not None
        assert [t.logprob for t in found.tokens] == pytest.approx(expected, abs=1e-3)
        assert all(token.top == [] for token in found.tokens)
        assert found.logprob == pytest.approx(sum(expected), abs=1e-2)
    assert reply.usage.prompt_tokens == len(prompt_text)
    assert reply.usage.scored_tokens == sum(map(len, given))
    assert reply.usage.cached_tokens == 0, "copies within a request do not count"
    copied = (len(prompt_text) - 1) // 32 * 32
    assert score(server, prompt_text, continuations=given).usage.cached_tokens == copied


def test_text_of_temperature_0_is_greedy(server: Serving) -> None:
    choice = server.generate(PROMPT, max_tokens=4, temperature=0)["choices"][0]
    ids = choice["token_ids"]
    others = [ids[:2], [*ids[:3], (ids[3] + 1) % 256], [(ids[0] + 1) % 256, *ids[1:]]]
    (prompt,) = score(server, continuations=[ids, *others]).prompts
    assert prompt.continuations is not None
    assert [one.is_greedy for one in prompt.continuations] == [True, True, False, False]
    assert all(one.tokens is None for one in prompt.continuations)


def test_scores_are_the_bits_of_prompt_logprobs(server: Serving) -> None:
    (prompt,) = score(server, logprobs=3).prompts
    assert prompt.score is not None
    generated = server.generate(PROMPT, max_tokens=1, prompt_logprobs=3)["prompts"][0]["tokens"]
    assert prompt.score.model_dump()["tokens"] == generated


def test_one_token_scores_nothing(server: Serving) -> None:
    (prompt,) = score(server, "x", logprobs=0).prompts
    assert prompt.score is not None
    assert prompt.score.logprob == 0
    assert (prompt.score.perplexity, prompt.score.bits_per_byte) == (None, None)
    assert prompt.score.is_greedy


def test_prompt_and_its_continuation_may_fill_the_context(server: Serving) -> None:
    (prompt,) = score(server, "x" * 100, continuations=["y" * 28]).prompts
    assert prompt.continuations is not None
    assert prompt.continuations[0].scored_tokens == 28
