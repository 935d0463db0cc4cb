"""Whole engines over the decoder of GPUs, `kernels/cuda/decoder.py`: on a CPU without recording, on
a machine with a GPU once more there."""

import copy
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from logitd.model.inference.engine.events import FinishReason
from logitd.model.inference.engine.requests import GenerationRequest, HiddenStates, Request
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    assert_is_reference,
    generation,
    outputs_request,
    random_params,
    random_prompt,
    run,
    small_gpt,
)
from tests.model.inference.kernels.cuda.test_decoder import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("speculate", ["none", "ngram"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_an_engine_gives_the_references_tokens(
    device: str, speculate: str, batch_invariant: bool
) -> None:
    """Requests of every kind that come at any time, some of which are aborted: more of them than
    slots, so that slots are used again, prompts that share prefixes, and texts that repeat."""
    gpt = small_gpt()
    rng = random.Random(f"{speculate} {batch_invariant}")
    make = partial(GraphDecoder, batch_invariant=batch_invariant)
    driven = Driven(copy.deepcopy(gpt).to(device), make_decoder=make, slots=3, speculate=speculate)
    shared = random_prompt(rng, 40)
    asked: dict[str, GenerationRequest] = {}
    for number in range(16):
        prompt = [*shared[: rng.choice([0, 32, 40])], *random_prompt(rng, rng.randint(1, 30))]
        sampling = random_params(rng, rng.randint(1, 16), 40)
        request = generation(str(number), prompt, n=rng.choice([1, 1, 2]), sampling=sampling)
        asked[request.request_id] = request
        driven.add(request)
        for _ in range(rng.randrange(4)):
            driven.step()
        if rng.random() < 0.2:
            driven.abort(str(rng.randrange(number + 1)))
    compared = 0
    for (name, index), outcome in driven.drain().items():
        if outcome.ended.reason is not FinishReason.ABORT:
            request = asked[name]
            assert_is_reference(gpt, request.token_ids, request.params, index, outcome.token_ids)
            compared += 1
    assert compared > 10
    driven.engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_batch_invariant_company_changes_no_bit(device: str) -> None:
    """Logprobs of prompts and completions, rows, hidden states: alone, then all together."""
    gpt = tiny_gpt(tiny_config(d_model=48, **FAMILIES["modern"])).to(device)
    rng = random.Random(0)
    pool: list[Request] = [
        generation(str(i), random_prompt(rng, rng.randint(1, 70), 257), prompt_logprobs=1,
                   sampling=replace(random_params(rng, 8, 257), logprobs=2))
        for i in range(8)
    ]  # fmt: skip
    pool.append(outputs_request("rows", random_prompt(rng, 75, 257)))
    states = outputs_request("states", random_prompt(rng, 41, 257), [3, 33, 40])
    pool.append(replace(states, output=HiddenStates(layers=(0, 2, 3))))

    def results(*requests: Request) -> dict[str, Any]:
        make = partial(GraphDecoder, batch_invariant=True)
        outcomes = run(gpt, *requests, make_decoder=make, slots=6, prefill_chunk=96)
        return {
            name: (
                [(event.token_id, event.chosen, event.top) for event in outcome.tokens],
                outcome.prompt,
                [row for event in outcome.rows for row in event.rows.tolist()],
            )
            for (name, _), outcome in outcomes.items()
        }

    together = results(*pool)
    for request in pool:
        assert results(request)[request.request_id] == together[request.request_id]
