"""After thousands of requests of every kind, the engine holds no data of any of them."""

import gc
import random
from collections import Counter

import pytest

from logitd.model.inference.engine.events import OutputsChunk, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest, OutputsRequest, ScoreRequest
from logitd.model.inference.engine.sequence import Sequence
from logitd.model.transformer.gpt import GPT
from tests.model.inference.engine.harness import Driven, counts, random_prompt, small_gpt
from tests.model.inference.engine.test_against_reference import random_request


def tracked_objects(*kinds: type) -> int:
    """Number of live objects that the garbage collector tracks, of the given types or of all."""
    gc.collect()
    return sum(not kinds or type(one) in kinds for one in gc.get_objects())


def serve(driven: Driven, gpt: GPT, rng: random.Random, requests: int) -> None:
    """Serve random requests, adding new ones as others end, and discard their outcomes."""
    shared = random_prompt(rng, 64, 16)
    for number in range(requests):
        driven.add(random_request(rng, str(number), gpt, shared))
        while driven.engine.stats().waiting >= 8:
            for event in driven.step().events:
                if isinstance(event, OutputsChunk):
                    driven.engine.grant(event.request_id)
        if rng.random() < 0.1:
            driven.abort(str(rng.randrange(number + 1)))
    outcomes = driven.drain()
    assert outcomes.keys() == driven.accepted
    assert Counter(outcome.ended.reason.value for outcome in outcomes.values())["length"]
    driven.outcomes.clear()
    driven.accepted.clear()


@pytest.mark.parametrize("requests", [240, pytest.param(1500, marks=pytest.mark.slow)])
def test_requests_leave_nothing_behind(requests: int) -> None:
    kinds = Sequence, GenerationRequest, OutputsRequest, ScoreRequest, TokenEvent
    before, rng = tracked_objects(*kinds), random.Random(0)
    gpt = small_gpt(n_layer=1, n_head=1, d_model=8, vocab_size=16, context_length=64)
    driven = Driven(gpt, slots=16)
    serve(driven, gpt, rng, requests // 2)
    half_way = tracked_objects()
    serve(driven, gpt, rng, requests // 2)
    assert tracked_objects() - half_way < 100, "something piles up"
    assert tracked_objects(*kinds) == before
    assert counts(driven.engine) == (0, 0, 16, 0)
