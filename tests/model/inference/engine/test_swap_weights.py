"""New weights under load: each request is answered by one set of weights."""

import random

import pytest
import torch

from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.reference import generate
from logitd.model.transformer.gpt import GPT
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


def test_swap_lets_earlier_requests_end_on_the_old_weights() -> None:
    rng = random.Random(0)
    driven = Driven(OLD, slots=2)
    early = [generation(f"early {i}", random_prompt(rng, 40), n=2, max_tokens=9) for i in range(2)]
    driven.add(*early)
    driven.step()  # the first request has both slots, the second waits
    driven.swap_weights(NEW)
    assert driven.engine.swapping()
    late = generation("late", early[0].token_ids, max_tokens=9)
    driven.add(late)
    outcomes = driven.drain()
    assert not driven.engine.swapping()
    for request, gpt in ((early[0], OLD), (early[1], OLD), (late, NEW)):
        for index in range(request.n):
            expected = generate(gpt, request.token_ids, request.params, index)
            assert outcomes[request.request_id, index].token_ids == expected


def test_cache_of_old_weights_is_never_shared() -> None:
    prompt = random_prompt(random.Random(2), 100)
    driven = Driven(OLD)
    driven.add(generation("old", prompt))
    driven.drain()
    driven.swap_weights(NEW)
    driven.add(generation("new", prompt))
    driven.add(generation("new again", prompt))
    outcomes = driven.drain()
    assert outcomes["new", 0].ended.cached_tokens == 0
    for name in ("new", "new again"):
        assert outcomes[name, 0].token_ids == generate(NEW, prompt, params())


@pytest.mark.parametrize("turn", ["before it is known", "once it is known"])
def test_request_uses_one_version_of_the_weights(turn: str) -> None:
    """All prompts of a sweep use the same version of the weights. Its later prompts may arrive when
    other requests already wait for the next version. Neither the later prompts nor those requests
    may block the others."""
    prompt = random_prompt(random.Random(3), 40)
    driven = Driven(OLD, slots=2)
    driven.add(generation("first", prompt))
    if turn == "once it is known":
        driven.swap_weights(NEW)
    driven.add(generation("new", prompt), weights=1)
    driven.step()
    driven.add(generation("second", prompt), weights=0)
    if turn == "before it is known":
        while driven.engine.has_work():
            driven.step()
        assert ("new", 0) not in driven.outcomes
        driven.swap_weights(NEW)
    outcomes = driven.drain()
    for name, gpt in (("first", OLD), ("second", OLD), ("new", NEW)):
        assert outcomes[name, 0].token_ids == generate(gpt, prompt, params())


def test_unknown_version_of_weights_is_refused() -> None:
    driven = Driven(OLD)
    for version in (-1, 2):
        with pytest.raises(InvalidRequest, match=f"version {version}.*0"):
            driven.engine.accept(generation("a", [1]), weights=version)
    driven.swap_weights(NEW)
    with pytest.raises(InvalidRequest, match=r"version 0.*1"):
        driven.engine.accept(generation("a", [1]), weights=0)


def test_second_swap_is_refused_until_the_first_ends() -> None:
    driven = Driven(OLD)
    driven.add(generation("old", [1, 2, 3]))
    driven.swap_weights(NEW)
    with pytest.raises(ValueError, match="earlier swap"):
        driven.swap_weights(NEW)
    assert driven.drain()["old", 0].token_ids == generate(OLD, [1, 2, 3], params())
    driven.swap_weights(OLD)
    assert driven.engine.weights == 2


def test_preparing_weights_changes_no_token() -> None:
    """Preparing writes no row of the cache."""
    prompt = random_prompt(random.Random(4), 40)
    driven = Driven(OLD)
    driven.add(generation("old", prompt, max_tokens=20))
    for _ in range(4):
        driven.step()
    driven.engine.prepare_weights(NEW).close()
    assert driven.drain()["old", 0].token_ids == generate(OLD, prompt, params(max_tokens=20))


def test_abort_completes_a_swap() -> None:
    """The last running sequence may be aborted between steps. If the swap waited for the next step,
    the waiting request would wait forever."""
    driven = Driven(OLD, slots=1)
    driven.add(generation("old", [1, 2, 3], max_tokens=50))
    driven.step()
    driven.swap_weights(NEW)
    driven.add(generation("new", [1, 2, 3]))
    driven.abort("old")
    assert driven.drain()["new", 0].token_ids == generate(NEW, [1, 2, 3], params())


@pytest.mark.parametrize(
    ("gpt", "message"),
    [
        (tiny_gpt(tiny_config()), "shape"),
        (tiny_gpt(CONFIG).to(torch.bfloat16), "bfloat16.*cpu.*float32"),
    ],
    ids=["shape", "dtype"],
)
def test_weights_of_another_shape_or_dtype_are_refused(gpt: GPT, message: str) -> None:
    driven = Driven(OLD)
    with pytest.raises(ValueError, match=message):
        driven.swap_weights(gpt)
    driven.add(generation("still served", [1, 2, 3]))
    assert driven.drain()["still served", 0].token_ids == generate(OLD, [1, 2, 3], params())
