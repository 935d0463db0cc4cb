"""Engine under any order of commands: hypothesis submits, steps, aborts, grants, waits.

The rules that hold at every moment are in `harness.Driven`: one finish per sequence and nothing
after it, counts equal to the events, no slot lost or shared, work when there is work. Readers of
rows fall behind, lose their slots to others and continue; their rows have the bits of an otherwise
idle engine.
"""

from functools import cache

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from logitd.model.inference.engine.events import FinishReason
from logitd.model.inference.engine.sequence import CHUNKS_IN_FLIGHT
from logitd.model.transformer.gpt import GPT
from tests.model.factories import tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    FakeClock,
    Outcome,
    Steps,
    check_integrity,
    generation,
    outputs_request,
    params,
    run,
)
from tests.profiles import examples

VOCABULARY = 16
CONTEXT = 80


def make_gpt(seed: int = 0) -> GPT:
    shape = {"n_layer": 1, "n_head": 1, "d_model": 8}
    config = tiny_config(**shape, vocab_size=VOCABULARY, context_length=CONTEXT)
    return tiny_gpt(config, seed)


GPT_OF_THE_MACHINE = make_gpt()
OTHER_WEIGHTS = make_gpt(seed=1)

# Prompts of few distinct blocks, so that they share prefixes.
prompts = st.builds(
    lambda block, rest, last: [block] * 32 * (rest > 20) + [last] * max(1, rest),
    block=st.integers(0, 2),
    rest=st.integers(0, 40),
    last=st.integers(0, 3),
)
timeouts = st.none() | st.integers(0, 5)
callers = st.sampled_from(["a", "b", "c"])


@cache
def _alone(prompt: tuple[int, ...]) -> np.ndarray:
    outcomes = run(GPT_OF_THE_MACHINE, outputs_request("alone", prompt), slots=1)
    rows: np.ndarray = np.concatenate([piece.rows for piece in outcomes["alone", 0].rows])
    return rows


def rows_alone(prompt: list[int]) -> np.ndarray:
    """Logits of every position of a prompt, from an otherwise idle engine."""
    return _alone(tuple(prompt))


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 4),
        blocks=st.integers(1, 3),
        prefix_reuse=st.booleans(),
        speculate=st.sampled_from(["none", "ngram"]),
    )
    def start(self, slots: int, blocks: int, prefix_reuse: bool, speculate: str) -> None:
        self.clock = FakeClock()
        self.driven = Driven(
            GPT_OF_THE_MACHINE,
            self.clock,
            slots=slots,
            prefill_chunk=32 * blocks,
            prefix_reuse=prefix_reuse,
            speculate=speculate,
        )
        self.driven.engine._scheduler.step_elements = 1
        self.count = 0
        self.asked: dict[tuple[str, int], int] = {}  # tokens or rows, by sequence
        self.steps: dict[tuple[str, int], int | None] = {}  # nothing may follow these
        self.rows: dict[str, tuple[list[int], list[int]]] = {}  # prompts and positions, by name
        self.taken: dict[str, int] = {}  # pieces
        self.compared: dict[str, int] = {}  # pieces
        self.swapped = False

    def name(self) -> str:
        self.count += 1
        return str(self.count)

    def deadline(self, seconds: int | None) -> float | None:
        return None if seconds is None else self.clock.now + seconds

    @rule(
        prompt=prompts,
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 8),
        stop=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=2),
        temperature=st.sampled_from([0.0, 1.0]),
        steps=st.none() | st.integers(1, 8),
        scored=st.none() | st.integers(0, 2),
        priority=st.integers(-1, 1),
        caller=callers,
        seconds=timeouts,
    )
    def submit_generation(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int,
        stop: frozenset[int],
        temperature: float,
        steps: int | None,
        scored: int | None,
        priority: int,
        caller: str,
        seconds: int | None,
    ) -> None:
        name = self.name()
        constraint = None if steps is None else Steps(VOCABULARY, length=steps)
        sampling = params(
            max_tokens, stop_token_ids=stop, temperature=temperature, constraint=constraint
        )
        self.driven.add(
            generation(
                name,
                prompt,
                n=n,
                deadline=self.deadline(seconds),
                prompt_logprobs=scored,
                priority=priority,
                caller=caller,
                sampling=sampling,
            )
        )
        self.asked |= {(name, index): max_tokens for index in range(n)}
        self.steps |= {(name, index): steps for index in range(n)}

    @rule(prompt=prompts, data=st.data(), caller=callers, seconds=timeouts)
    def submit_rows(
        self, prompt: list[int], data: st.DataObject, caller: str, seconds: int | None
    ) -> None:
        positions = sorted(data.draw(st.sets(st.integers(0, len(prompt) - 1), min_size=1)))
        self.ask_for_rows(prompt, positions, caller, seconds)

    @rule(block=st.integers(0, 2), caller=callers, seconds=timeouts)
    def submit_many_rows(self, block: int, caller: str, seconds: int | None) -> None:
        """Ask for more pieces than may be in flight, so that the reader can be behind."""
        self.ask_for_rows([block] * 75, list(range(75)), caller, seconds)

    def ask_for_rows(
        self, prompt: list[int], positions: list[int], caller: str, seconds: int | None
    ) -> None:
        name = self.name()
        deadline = self.deadline(seconds)
        self.driven.add(outputs_request(name, prompt, positions, deadline=deadline, caller=caller))
        self.asked[name, 0] = len(positions)
        self.rows[name] = (prompt, positions)

    @rule()
    def step(self) -> None:
        self.driven.step()

    @precondition(lambda self: self.driven.unfinished)
    @rule(data=st.data(), index=st.none() | st.integers(0, 3))
    def abort(self, data: st.DataObject, index: int | None) -> None:
        """Abort a whole request or one of its sequences, which may have ended."""
        name, _ = data.draw(st.sampled_from(sorted(self.driven.unfinished)))
        before = self.driven.unfinished
        gone = {key for key in before if key[0] == name and index in (None, key[1])}
        self.driven.abort(name, index)
        assert self.driven.unfinished == before - gone
        for key in gone:
            assert self.driven.outcomes[key].ended.reason is FinishReason.ABORT

    @precondition(lambda self: self.driven.unfinished)
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        """Grant a piece that was not taken yet, if there is one."""
        name, _ = data.draw(st.sampled_from(sorted(self.driven.unfinished)))
        self.take(name)

    def take(self, name: str) -> None:
        """The reader of a request takes a piece."""
        outcome = self.driven.outcomes.get((name, 0))
        if outcome is not None and len(outcome.rows) > self.taken.get(name, 0):
            self.taken[name] = self.taken.get(name, 0) + 1
            self.driven.engine.grant(name)

    @precondition(lambda self: not self.driven.engine.swapping())
    @rule(other=st.booleans())
    def swap_weights(self, other: bool) -> None:
        """Swap the weights: earlier requests continue, and none is lost."""
        self.swapped = self.swapped or other
        self.driven.swap_weights(OTHER_WEIGHTS if other else GPT_OF_THE_MACHINE)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def the_engine_is_whole(self) -> None:
        check_integrity(self.driven.engine)
        stats = self.driven.engine.stats()
        assert stats.waiting + stats.running + stats.paused == len(self.driven.unfinished)
        assert stats.paused <= stats.slots
        assert self.driven.evicted_sequences >= stats.paused
        assert stats.slots_used == stats.running <= stats.slots

    @invariant()
    def nobody_gets_more_than_was_asked_for(self) -> None:
        for key, outcome in self.driven.outcomes.items():
            assert len(outcome.tokens) + len(outcome.positions) <= self.asked[key]
            assert outcome.positions == sorted(set(outcome.positions))

    @invariant()
    def few_pieces_wait_for_a_reader(self) -> None:
        for name in self.rows:
            if (outcome := self.driven.outcomes.get((name, 0))) is not None:
                assert len(outcome.rows) - self.taken.get(name, 0) <= CHUNKS_IN_FLIGHT

    @invariant()
    def rows_are_the_same_bits_whatever_happened(self) -> None:
        """Alone, or after any number of evictions."""
        if self.swapped:
            return
        for name, (prompt, positions) in self.rows.items():
            outcome = self.driven.outcomes.get((name, 0))
            if outcome is None or len(outcome.rows) == self.compared.get(name, 0):
                continue
            assert outcome.positions == positions[: len(outcome.positions)]
            expected = rows_alone(prompt)[outcome.positions]
            assert np.array_equal(np.concatenate([piece.rows for piece in outcome.rows]), expected)
            self.compared[name] = len(outcome.rows)

    def teardown(self) -> None:
        """Drain while readers read: every request ends, in a number of steps bounded by the
        work."""
        if not hasattr(self, "driven"):
            return
        budget = 2 + sum(CONTEXT // 32 + 1 + asked for asked in self.asked.values())
        budget += 3 * len(self.rows) * (CONTEXT // 32 + 1)  # work repeated because of evictions
        while self.driven.unfinished:
            for name in self.rows:
                for _ in range(CHUNKS_IN_FLIGHT):
                    self.take(name)
            self.driven.step()
            budget -= 1
            assert budget > 0, "there are too many steps"
        self.driven.step()  # deadlines of requests that wait for nothing else
        assert self.driven.outcomes.keys() == self.driven.accepted
        assert self.driven.unfinished == set()
        for key, outcome in self.driven.outcomes.items():
            self.check_end(key, outcome)
        assert self.driven.engine.stats().slots_used == 0

    def check_end(self, key: tuple[str, int], outcome: Outcome) -> None:
        got, end = len(outcome.tokens) + len(outcome.positions), outcome.ended
        assert end.completion_tokens == len(outcome.tokens)
        assert end.reason is not FinishReason.ERROR
        if end.reason is FinishReason.UNREAD:
            assert outcome.rows
        if end.reason is FinishReason.LENGTH or (outcome.rows and end.reason is FinishReason.STOP):
            assert got == self.asked[key]
        if end.reason is FinishReason.STOP and outcome.tokens:
            last = outcome.tokens[-1].token_id
            assert end.stop_token_id == last or got == self.steps[key]
        times = end.times
        moments = [times.arrived, times.admitted, times.prefilled, times.finished]
        known = [moment for moment in moments if moment is not None]
        assert known == sorted(known)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=examples(200, fast=3), stateful_step_count=40)
