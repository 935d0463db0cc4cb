"""Commands for an engine, and the engine's events while it executes them. Hypothesis draws requests
of every kind, aborts, deadlines, new weights and grants of outputs. The decoder simulates an
asynchronous device that works as late as possible. `test_overlap.py` compares the events."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from logitd.model.inference.engine.events import Event, OutputsChunk
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.base import Collect
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.sample import SamplingRows
from logitd.model.transformer.gpt import GPT
from tests.model.factories import tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    FakeClock,
    Steps,
    generation,
    outputs_request,
    params,
    random_params,
    small_gpt,
)
from tests.model.inference.kernels.late import LateDecoder, LateDevice

VOCABULARY = 40
CONFIG = small_gpt().config
OLD, NEW = tiny_gpt(CONFIG, seed=1), tiny_gpt(CONFIG, seed=2)


class Launching(LateDecoder):
    """A decoder on a simulated asynchronous device. It counts its calls."""

    def __init__(self, gpt: GPT, cache: KVCache, **options: Any) -> None:
        super().__init__(LateDevice(), gpt, cache, **options)
        self.decoded = self.launched = self.launched_next = 0

    def decode(
        self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        self.decoded += 1
        return super().decode(token_ids, slots, positions)

    def launch(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        self.launched += 1
        return super().launch(token_ids, slots, positions, sampling)

    def launch_next(
        self,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        self.launched_next += 1
        return super().launch_next(rows, slots, positions, sampling)


def launching(driven: Driven) -> Launching:
    decoder = driven.engine._runner.model.decoder
    assert isinstance(decoder, Launching)
    return decoder


# A command for an engine: (kind, two numbers).
Command = tuple[str, int, int]

prompts = st.builds(
    lambda block, rest, last: [block] * 32 * (rest > 10) + [last] * max(1, rest),
    block=st.integers(0, 1),
    rest=st.integers(0, 40),
    last=st.integers(0, 3),
)


@dataclass(frozen=True)
class Ask:
    """A description of a request. The request gets its name when it is sent."""

    kind: str
    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    seed: int
    timeout: int | None

    def request(self, name: str, now: float) -> Any:
        deadline = None if self.timeout is None else now + self.timeout
        if self.kind == "rows":
            return outputs_request(name, self.prompt, deadline=deadline)
        rng = random.Random(self.seed)
        asking = random_params(rng, self.max_tokens, VOCABULARY)
        sampling = plain_params(rng, self.max_tokens)
        if self.kind == "constraint":
            constraint = Steps(VOCABULARY, by=3, length=rng.choice([None, 4]))
            sampling = replace(sampling, constraint=constraint)
        return generation(
            name,
            self.prompt,
            n=self.n,
            deadline=deadline,
            prompt_logprobs=rng.choice([None, None, 1]),
            priority=rng.choice([0, 0, 1]),
            caller=rng.choice("ab"),
            sampling=asking if self.kind == "asking" else sampling,
        )


def plain_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    """Parameters without constraints or penalties: greedy or sampled, with or without filters and
    stop tokens."""
    return params(
        max_tokens,
        seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 7]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        stop_token_ids=frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 1, 3]))),
    )


asks = st.builds(
    Ask,
    kind=st.sampled_from(["plain"] * 6 + ["asking", "constraint", "rows"]),
    prompt=prompts.map(tuple),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    max_tokens=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    timeout=st.sampled_from([None, None, None, 1, 4]),
)
steps = st.tuples(st.just("step"), st.integers(1, 6), st.just(0))
others = st.one_of(
    st.tuples(st.just("abort"), st.integers(0, 5), st.integers(-1, 2)),
    st.tuples(st.just("wait"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("swap"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("grant"), st.integers(0, 5), st.just(0)),
)
plays = st.lists(st.one_of(asks, steps, steps, others), min_size=2, max_size=25)


class Played:
    """An engine that executes commands and records all events."""

    def __init__(
        self, gpt: GPT = OLD, make: DecoderMaker | None = None, *, slots: int = 3, **options: Any
    ) -> None:
        make = make or partial(Launching, **({"batch_invariant": True, "most_steps": 1} | options))
        self.clock = FakeClock()
        self.driven = Driven(gpt, self.clock, make_decoder=make, slots=slots)
        self.driven.engine._scheduler.step_elements = 1  # so that readers of rows fall behind
        self.asked: list[Any] = []
        self.told: list[Any] = []

    def play(self, commands: Sequence[Ask | Command]) -> list[Any]:
        for command in commands:
            if isinstance(command, Ask):
                request = command.request(str(len(self.asked)), self.clock.now)
                self.asked.append(request)
                self.driven.add(request)
            else:
                self.apply(*command)
            self.told.append(self.driven.engine.has_work())
        for request in self.asked:
            for _ in range(10):
                self.driven.engine.grant(request.request_id)
        while self.driven.engine.has_work():
            self.step()
        self.driven.step()  # deadlines of requests that wait for nothing else
        assert not self.driven.unfinished
        assert self.driven.engine.stats().slots_used == 0
        self.driven.engine.close()
        return self.told

    def apply(self, what: str, number: int, index: int) -> None:
        engine = self.driven.engine
        match what:
            case "step":
                for _ in range(number):
                    self.step()
            case "abort":
                self.note(self.driven.abort(str(number), None if index < 0 else index))
            case "wait":
                self.clock.now += number
            case "swap":
                if not engine.swapping():
                    self.driven.swap_weights(NEW if number else OLD)
                self.told.append(engine.swapping())
            case "grant":
                engine.grant(str(number))

    def step(self) -> None:
        result = self.driven.step()
        self.told.append(replace(result, events=()))
        self.note(result.events)
        self.told += [self.driven.engine.stats(), self.driven.engine.has_work()]

    def note(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, OutputsChunk):
                self.told.append((event.request_id, event.positions, event.rows.tolist()))
            else:
                self.told.append(event)


def ask_in_turn(played: Played, prompts: list[list[int]], waits: list[int]) -> list[Any]:
    """Send prompts some steps apart, and return all events until the last request has ended."""
    for number, (prompt, wait) in enumerate(zip(prompts, waits, strict=False)):
        played.driven.add(generation(str(number), prompt, max_tokens=3 + 2 * number))
        played.apply("step", wait, 0)
    return played.play([])
