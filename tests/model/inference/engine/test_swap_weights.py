"""New weights under load: a request is answered by one set of them, and never by a mixture."""

import random

import pytest
import torch

from model.inference.reference import generate
from model.transformer.gpt import GPT
from tests.model.factories import tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    generation,
    params,
    random_prompt,
    small_gpt,
)

CONFIG = small_gpt().config
OLD, NEW = tiny_gpt(CONFIG, seed=1), tiny_gpt(CONFIG, seed=2)


def test_what_has_begun_ends_on_the_old_weights() -> None:
    rng = random.Random(0)
    driven = Driven(OLD, slots=2)
    early = [generation(f"early {i}", random_prompt(rng, 40), n=2, max_tokens=9) for i in range(2)]
    for request in early:
        driven.add(request)
    driven.step()  # the first request has both slots, the second waits
    driven.engine.swap_weights(NEW)
    assert driven.engine.swapping()
    late = generation("late", early[0].token_ids, max_tokens=9)
    driven.add(late)
    outcomes = driven.drain()
    assert not driven.engine.swapping()
    for request, gpt in ((early[0], OLD), (early[1], NEW), (late, NEW)):
        for index in range(request.n):
            expected = generate(gpt, request.token_ids, request.params, index)
            assert outcomes[request.request_id, index].token_ids == expected


def test_a_sibling_that_still_waits_belongs_to_what_has_begun() -> None:
    """With one slot the three sequences run one after the other; the swap comes after the first."""
    driven = Driven(OLD, slots=1)
    request = generation("trio", random_prompt(random.Random(1), 50), n=3, max_tokens=4,
                         temperature=1.0)  # fmt: skip
    driven.add(request)
    driven.step()
    driven.engine.swap_weights(NEW)
    outcomes = driven.drain()
    for index in range(3):
        expected = generate(OLD, request.token_ids, request.params, index)
        assert outcomes["trio", index].token_ids == expected


def test_the_cache_of_old_weights_is_never_shared() -> None:
    prompt = random_prompt(random.Random(2), 100)
    driven = Driven(OLD)
    driven.add(generation("old", prompt))
    driven.drain()
    driven.engine.swap_weights(NEW)
    driven.add(generation("new", prompt))
    driven.add(generation("new again", prompt))
    outcomes = driven.drain()
    assert outcomes["new", 0].ended.cached_tokens == 0
    for name in ("new", "new again"):
        assert outcomes[name, 0].token_ids == generate(NEW, prompt, params())


def test_an_idle_engine_swaps_at_once() -> None:
    driven = Driven(OLD)
    driven.engine.swap_weights(NEW)
    assert not driven.engine.swapping()


def test_an_abort_completes_a_swap() -> None:
    """The last of those who had begun may be aborted between steps: nobody would step for the one
    who waits, had the swap been left to the next step."""
    driven = Driven(OLD, slots=1)
    driven.add(generation("old", [1, 2, 3], max_tokens=50))
    driven.step()
    driven.engine.swap_weights(NEW)
    driven.add(generation("new", [1, 2, 3]))
    driven.abort("old")
    assert driven.drain()["new", 0].token_ids == generate(NEW, [1, 2, 3], params())


@pytest.mark.parametrize(
    ("gpt", "message"),
    [
        (tiny_gpt(tiny_config()), "another shape"),
        (tiny_gpt(CONFIG).to(torch.bfloat16), "torch.bfloat16 on cpu, those being served torch.f"),
    ],
    ids=["shape", "dtype"],
)
def test_weights_that_do_not_fit_are_refused(gpt: GPT, message: str) -> None:
    driven = Driven(OLD)
    with pytest.raises(ValueError, match=message):
        driven.engine.swap_weights(gpt)
    driven.add(generation("still served", [1, 2, 3]))
    assert driven.drain()["still served", 0].token_ids == generate(OLD, [1, 2, 3], params())
