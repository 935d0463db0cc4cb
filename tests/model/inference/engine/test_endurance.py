"""Engine: after thousands of requests of every kind nothing is left of them."""

import gc
import random

import pytest

from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import FinishEvent, OutputsChunk, TokenEvent
from logitd.model.inference.engine.requests import (
    GenerationRequest,
    OutputsRequest,
    Request,
)
from logitd.model.inference.engine.sequence import Sequence
from logitd.model.inference.sampling.params import SamplingParams
from tests.model.inference.engine.harness import (
    counts,
    generation,
    outputs_request,
    random_prompt,
    small_gpt,
)


def tracked_objects(*kinds: type) -> int:
    """Objects that are alive: all that the garbage collector tracks, or those of some kinds."""
    gc.collect()
    return sum(not kinds or type(one) in kinds for one in gc.get_objects())


class Endurance:
    """One engine, and requests of random shape that arrive as others end."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        gpt = small_gpt(n_layer=1, n_head=1, d_model=8, vocab_size=16, context_length=64)
        self.engine = Engine(gpt, EngineConfig(slots=16, prefill_chunk=64))
        self.expected: dict[str, int] = {}  # sequences, by request
        self.ends: dict[str, int] = {}

    def request(self, name: str) -> Request:
        rng = self.rng
        prompt = random_prompt(rng, rng.choice([1, 2, 5, 9, 33, 50]), 16)
        if rng.random() < 0.2:
            positions = sorted(rng.sample(range(len(prompt)), rng.randint(1, len(prompt))))
            return outputs_request(name, prompt, positions)
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 6),
            seed=rng.getrandbits(64),
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            stop_token_ids=frozenset({3}),
        )
        return generation(name, prompt, n=rng.choice([1, 1, 1, 2]), sampling=sampling)

    def serve(self, count: int) -> None:
        engine, rng = self.engine, self.rng
        total = len(self.expected) + count
        while len(self.expected) < total or engine.has_work():
            while len(self.expected) < total and engine.stats().waiting < 8:
                request = self.request(str(len(self.expected)))
                engine.add(request)
                n = request.n if isinstance(request, GenerationRequest) else 1
                self.expected[request.request_id] = n
            events = list(engine.step().events)
            if rng.random() < 0.1:
                events += engine.abort(str(rng.randrange(len(self.expected))))
            for event in events:
                if isinstance(event, FinishEvent):
                    self.ends[event.request_id] = self.ends.get(event.request_id, 0) + 1
                elif isinstance(event, OutputsChunk):
                    engine.grant(event.request_id)
        engine.check_integrity()


def endure(requests: int, seed: int) -> None:
    """Serve two halves; after each, nothing is left of anybody."""
    kinds = Sequence, GenerationRequest, OutputsRequest, TokenEvent
    before = tracked_objects(*kinds)
    endurance = Endurance(seed)
    endurance.serve(requests // 2)
    half_way = tracked_objects()
    endurance.serve(requests // 2)
    assert tracked_objects() - half_way < 100, "something piles up"
    assert tracked_objects(*kinds) == before
    assert endurance.ends == endurance.expected
    assert counts(endurance.engine) == (0, 0, 16, 0)


def test_thousand_requests_leave_nothing_behind() -> None:
    endure(1000, seed=0)


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    endure(10_000, seed=1)
