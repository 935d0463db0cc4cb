"""POST /probs: the distribution, compared with a plain computation from the model's own forward
pass.
"""

import math
from typing import Any

import pytest
import torch

from logitd.model.operations.probs import ProbsReply
from logitd.model.transformer.gpt import GPT
from tests.service.serving import Serving

PROMPT = "for i in "


def probs(server: Serving, prompt: Any = PROMPT, **fields: Any) -> ProbsReply:
    return ProbsReply.model_validate(server.json("/probs", {"prompt": prompt, **fields}))


@pytest.fixture(scope="module")
def plain(gpt: GPT) -> list[float]:
    """Softmax by its definition, in Python's floats."""
    logits = gpt(torch.tensor([list(PROMPT.encode())])).logits[0, -1].tolist()
    weights = [math.exp(x - max(logits)) for x in logits]
    return [weight / math.fsum(weights) for weight in weights]


def test_whole_distribution_can_be_requested(server: Serving, plain: list[float]) -> None:
    reply = probs(server, top_k=257)
    (prompt,) = reply.prompts
    assert [token.rank for token in prompt.tokens] == list(range(1, 258))
    assert {token.id for token in prompt.tokens} == set(range(257))
    assert math.fsum(token.prob for token in prompt.tokens) == pytest.approx(1, abs=1e-12)
    assert prompt.mass == pytest.approx(1, abs=1e-12)
    for token in prompt.tokens:
        assert token.prob == pytest.approx(plain[token.id], rel=1e-3)
        assert token.logprob == pytest.approx(math.log(plain[token.id]), abs=1e-4)
        assert token.logprob is not None
        assert math.exp(token.logprob) == pytest.approx(token.prob)
    entropy = -math.fsum(p * math.log(p) for p in plain)
    assert prompt.entropy == pytest.approx(entropy, abs=1e-4)


@pytest.mark.parametrize(("fields", "count"), [({}, 10), ({"top_k": 3}, 3), ({"top_k": 1}, 1)])
def test_likeliest_tokens_are_listed(
    server: Serving, plain: list[float], fields: dict[str, Any], count: int
) -> None:
    (prompt,) = probs(server, **fields).prompts
    best = sorted(range(257), key=lambda i: -plain[i])[:count]
    assert [token.id for token in prompt.tokens] == best
    assert [token.rank for token in prompt.tokens] == list(range(1, count + 1))
    assert prompt.mass == pytest.approx(sum(plain[i] for i in best), abs=1e-4)
    (everything,) = probs(server, top_k=257).prompts
    assert prompt.entropy == everything.entropy, (
        "of the whole distribution, not of the listed tokens"
    )


def test_named_tokens_keep_their_order_and_know_their_rank(
    server: Serving, plain: list[float]
) -> None:
    (everything,) = probs(server, top_k=257).prompts
    known = {token.id: token for token in everything.tokens}
    ids = [256, 0, everything.tokens[0].id, everything.tokens[99].id]
    (prompt,) = probs(server, token_ids=ids).prompts
    assert prompt.tokens == [known[i] for i in ids]
    assert [token.rank for token in prompt.tokens][2:] == [1, 100]
    assert prompt.mass == pytest.approx(sum(plain[i] for i in ids), rel=1e-3)


def test_repeated_token_counts_once(server: Serving) -> None:
    (once,) = probs(server, token_ids=[32]).prompts
    (twice,) = probs(server, token_ids=[32, 32]).prompts
    assert len(twice.tokens) == 2
    assert twice.mass == once.mass == once.tokens[0].prob


def test_tokens_by_text(server: Serving) -> None:
    (prompt,) = probs(server, tokens=["a", " ", "<|endoftext|>"]).prompts
    (by_id,) = probs(server, token_ids=[97, 32, 256]).prompts
    assert prompt.tokens == by_id.tokens


def test_processing_keeps_the_sampled_distribution(server: Serving, plain: list[float]) -> None:
    processing = {"temperature": 0.5, "top_p": 0.5}
    (prompt,) = probs(server, stage="processed", processing=processing, top_k=257).prompts
    weights = [p**2 for p in plain]
    best = sorted(range(257), key=lambda i: -plain[i])
    kept, mass = [], 0.0
    for i in best:
        if mass >= 0.5:
            break
        kept.append(i)
        mass += weights[i] / sum(weights)
    assert [token.id for token in prompt.tokens] == kept
    left = sum(weights[i] for i in kept)
    for token in prompt.tokens:
        assert token.prob == pytest.approx(weights[token.id] / left, rel=1e-3)
    assert prompt.mass == pytest.approx(1)
    entropy = -sum(weights[i] / left * math.log(weights[i] / left) for i in kept)
    assert prompt.entropy == pytest.approx(entropy, abs=1e-3)
    (dropped,) = probs(
        server, stage="processed", processing=processing, token_ids=[best[-1]]
    ).prompts
    assert (dropped.tokens[0].prob, dropped.tokens[0].logprob) == (0, None)


def test_temperature_0_skips_the_filters(server: Serving) -> None:
    greedy = {"temperature": 0, "logit_bias": {"65": 3.0}}
    filters = {"top_k": 1, "top_p": 0.1, "min_p": 0.9}
    expected, found = (
        probs(server, stage="processed", processing=processing, top_k=257).prompts[0].tokens
        for processing in ({**greedy, "temperature": 1}, {**greedy, **filters})
    )
    assert found == expected


def test_perplexity_of_prompts_matches_the_forward(server: Serving, gpt: GPT) -> None:
    reply = probs(server, [PROMPT, "x"], perplexity=True, top_k=1)
    ids = list(PROMPT.encode())
    rows = gpt(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    mean = sum(rows[i, ids[i + 1]].item() for i in range(len(ids) - 1)) / (len(ids) - 1)
    assert reply.prompts[0].perplexity == pytest.approx(math.exp(-mean), rel=1e-3)
    assert reply.prompts[1].perplexity is None
    assert "perplexity" not in server.json("/probs", {"prompt": PROMPT})["prompts"][0]


@pytest.mark.parametrize(
    "processing",
    [None, {"temperature": 0.7}, {"temperature": 0}, {"top_p": 0.8, "logit_bias": {"65": 3.0}},
     {"repetition_penalty": 1.3, "min_p": 0.01}, {"top_k": 40, "temperature": 1.5}],
    ids=str,
)  # fmt: skip
def test_probs_are_the_distribution_that_generate_samples_from(
    server: Serving, processing: dict[str, Any] | None
) -> None:
    stage = "raw" if processing is None else "processed"
    prompts = [[*range(first, 3 * first + 1)] for first in range(20)]
    sampling = {"max_tokens": 1, "logprobs": 5, "logprobs_stage": stage, "seed": 2}
    choices = server.generate(prompts, **sampling, **(processing or {}))["choices"]
    found = probs(server, prompts, top_k=5, stage=stage, processing=processing).prompts
    for choice, prompt in zip(choices, found, strict=True):
        listed = [(token.id, token.rank, token.logprob) for token in prompt.tokens]
        top = [
            (token["id"], token["rank"], token["logprob"]) for token in choice["tokens"][0]["top"]
        ]
        assert top == listed, "bit for bit"


def test_perplexity_computes_each_block_of_a_prompt_once(server: Serving) -> None:
    prompt = "A separate prompt, which no other test of this server has computed: " + "y" * 50
    before = server.sample("logitd_prefill_tokens_total")
    probs(server, prompt, perplexity=True)
    computed = server.sample("logitd_prefill_tokens_total") - before
    assert computed == len(prompt) + len(prompt) % 32, "only the last block is computed again"
