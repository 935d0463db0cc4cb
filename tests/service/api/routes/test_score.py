"""POST /score: against the model's plain forward, and against its own arithmetic."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.transformer.gpt import GPT
from logitd.service.schemas.base import ErrorReply
from logitd.service.schemas.tensors import ScoreReply
from tests.service.serving import Serving, serving

PROMPT = "A prompt of more than thirty-two tokens, to have two blocks"


def score(server: Serving, prompt: Any = PROMPT, **fields: Any) -> ScoreReply:
    return ScoreReply.model_validate(server.json("/score", {"prompt": prompt, **fields}))


def plain(gpt: GPT, text: str) -> Tensor:
    """Logprobs (T, V) of the plain forward."""
    return gpt(torch.tensor([list(text.encode())])).logits[0].double().log_softmax(dim=-1)


def test_a_text_as_a_whole(server: Serving, gpt: GPT) -> None:
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
    assert found.bits_per_byte == pytest.approx(-mean / math.log(2))  # a byte per token here


def test_continuations(server: Serving, gpt: GPT) -> None:
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
    copied = (len(prompt_text) - 1) // 32 * 32
    assert reply.usage.cached_tokens == 2 * copied, "computed by the first, copied by the others"


def test_what_temperature_0_would_give_is_greedy(server: Serving) -> None:
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


def test_many_prompts_with_and_without_continuations(server: Serving) -> None:
    prompts: list[Any] = [PROMPT, "x", [256, 3]]
    reply = score(server, prompts, continuations=["a", [98, 99]])
    assert [prompt.index for prompt in reply.prompts] == [0, 1, 2]
    for given, found in zip(prompts, reply.prompts, strict=True):
        assert score(server, given, continuations=["a", [98, 99]]).prompts[0].continuations == (
            found.continuations
        )
    whole = score(server, prompts)
    assert [p.score.scored_tokens for p in whole.prompts if p.score] == [len(PROMPT) - 1, 0, 1]


def test_one_token_scores_nothing(server: Serving) -> None:
    (prompt,) = score(server, "x", logprobs=0).prompts
    assert prompt.score is not None
    assert prompt.score.logprob == 0
    assert (prompt.score.perplexity, prompt.score.bits_per_byte) == (None, None)
    assert prompt.score.is_greedy


def test_a_prompt_and_its_continuation_may_fill_the_context(server: Serving) -> None:
    (prompt,) = score(server, "x" * 100, continuations=["y" * 28]).prompts
    assert prompt.continuations is not None
    assert prompt.continuations[0].scored_tokens == 28


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 129}, "prompt"),
        ({"continuations": []}, "continuations"),
        ({"continuations": ["a", ""]}, "continuations"),
        ({"continuations": [[257]]}, "continuations"),
        ({"continuations": ["x" * 70]}, "continuations"),
        ({"continuations": ["x" * 129]}, "continuations"),
        ({"continuations": ["x"] * 65}, "continuations"),
        ({"continuations": "x"}, "continuations"),
        ({"logprobs": 258}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 1}, "max_tokens"),
    ],
)
def test_what_has_no_score_is_refused(server: Serving, fields: dict[str, Any], param: str) -> None:
    response = server.post("/score", {"prompt": PROMPT, **fields})
    assert response.status_code == 400, response.text
    assert ErrorReply.model_validate(response.json()).error.param == param


@pytest.mark.parametrize("wrong", [[1.5], [None], [["a"]], ["a", {}]])
def test_a_wrong_continuation_is_told_in_words(server: Serving, wrong: Any) -> None:
    response = server.post("/score", {"prompt": PROMPT, "continuations": wrong})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("continuations must be a list of strings and of lists of token ids")


def test_the_reply_is_bounded(server: Serving) -> None:
    with serving(server.served.checkpoint.path, max_reply_elements=200 * 64) as small:
        assert small.post("/score", {"prompt": "x" * 99}).status_code == 200
        response = small.post("/score", {"prompt": "x" * 99, "logprobs": 5})
        assert response.status_code == 400
        assert "594 logprobs; 200 are allowed" in response.json()["error"]["message"]


def test_a_timeout_is_504(server: Serving) -> None:
    response = server.post("/score", {"prompt": PROMPT, "timeout": 1e-9})
    assert response.status_code == 504


def test_the_reply_names_its_model(server: Serving) -> None:
    reply = score(server)
    assert reply.model == reply.checkpoint.name == "tiny"
    assert reply.id.startswith("score-")
