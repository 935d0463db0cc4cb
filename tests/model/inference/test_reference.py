"""Reference: the oracle's results compared with results worked out by hand."""

import math
from typing import Any

import pytest
import torch

from logitd.model.inference.reference import filtered, generate, penalized, sample_row
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.philox import uniform
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "seed": 0, "temperature": 1.0} | fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_argmax_of_the_plain_forward(family: str) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    prompt = random_ids(6, seed=3).tolist()
    tokens = generate(gpt, prompt, params(max_tokens=20, temperature=0.0))
    assert len(tokens) == 20
    # One forward over the finished text gives the same at every position.
    logits = gpt(torch.tensor([prompt + tokens])).logits[0]
    best = logits[len(prompt) - 1 : -1].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-4, "too close to call; choose another prompt"
    assert logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == tokens
    assert len(set(tokens)) > 2


def test_stop_token_ends_the_text_and_belongs_to_it() -> None:
    gpt = tiny_gpt()
    tokens = generate(gpt, [1, 2, 3], params(max_tokens=12, temperature=0.0))
    stop = frozenset({tokens[4]})
    first = tokens.index(tokens[4])
    stopped = params(max_tokens=12, temperature=0.0, stop_token_ids=stop)
    assert generate(gpt, [1, 2, 3], stopped) == tokens[: first + 1]


def test_sampled_text_depends_on_seed_and_index() -> None:
    gpt = tiny_gpt()
    texts = {
        (seed, index): tuple(generate(gpt, [1, 2, 3], params(seed=seed), index))
        for seed in range(3)
        for index in range(3)
    }
    assert len(set(texts.values())) == 9
    assert tuple(generate(gpt, [1, 2, 3], params(seed=2), 1)) == texts[2, 1]


def test_draw_is_an_inverted_cumulated_mass() -> None:
    logits = [math.log(x) for x in (0.1, 0.2, 0.3, 0.4)]
    for seed in range(100):
        u = uniform(seed, 3, 1)
        expected = 0 if u < 0.1 else 1 if u < 0.3 else 2 if u < 0.6 else 3
        assert sample_row(logits, [0, 0, 0], 2, params(seed=seed), index=1) == expected


def test_penalties_equal_numbers_by_hand() -> None:
    """The prompt has the ids 0 and 3, and the completion has the ids 1, 1 and 2. Bias and bans are
    applied first, then the three penalties in order."""
    tokens, logits = [0, 3, 1, 1, 2], [4.0, -2.0, 6.0, -8.0, 1.0, 5.0]

    def row(**fields: Any) -> list[float]:
        return penalized(logits, tokens, 2, params(**fields))

    assert row() == logits
    assert row(logit_bias={4: 1.5, 0: -10.0}) == [-6.0, -2.0, 6.0, -8.0, 2.5, 5.0]
    assert row(allowed_token_ids=(0, 5)) == [4.0, *[-math.inf] * 4, 5.0]
    assert row(stop_token_ids=frozenset({5}), min_tokens=3) == logits  # there are three
    assert row(stop_token_ids=frozenset({5}), min_tokens=4) == [*logits[:5], -math.inf]
    assert row(repetition_penalty=2.0) == [2.0, -4.0, 3.0, -16.0, 1.0, 5.0]
    assert row(presence_penalty=0.5) == [4.0, -2.5, 5.5, -8.0, 1.0, 5.0]
    assert row(frequency_penalty=0.5) == [4.0, -3.0, 5.5, -8.0, 1.0, 5.0]
    everything = row(
        logit_bias={1: 4.0}, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5
    )
    assert everything == [2.0, 2.0 / 2 - 1.25, 6.0 / 2 - 0.75, -16.0, 1.0, 5.0]


def test_filters_keep_the_ids_found_by_hand() -> None:
    logits = [math.log(x) for x in (0.1, 0.4, 0.1, 0.25, 0.15)]

    def left(**fields: Any) -> set[int]:
        return {i for i, x in enumerate(filtered(logits, params(**fields))) if x > -math.inf}

    assert left() == {0, 1, 2, 3, 4}
    assert left(top_k=1) == {1}
    assert left(top_k=4) == {0, 1, 2, 3, 4}  # the fourth and the fifth tie
    assert left(top_p=0.4 - 1e-9) == {1}
    assert left(top_p=0.64) == {1, 3}
    assert left(top_p=0.81) == {0, 1, 3, 4}  # of two ties, the lower id comes first
    assert left(min_p=0.3) == {1, 3, 4}
    quarters = filtered([0.0] * 4, params(top_p=0.5))  # reached exactly: no more ids are needed
    assert quarters == [0.0, 0.0, -math.inf, -math.inf]
    assert left(top_k=2, top_p=0.62) == {1, 3}  # 0.4 is 0.615 of the mass after top_k
    assert left(top_k=2, top_p=0.61) == {1}
    assert left(min_p=0.3, temperature=0.5) == {1, 3}
    assert left(min_p=0.3, temperature=10.0) == {0, 1, 2, 3, 4}
