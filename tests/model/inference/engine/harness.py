"""Helpers that drive an engine in tests: requests, and outcomes by sequence.

`Driven` records an engine's events and checks in every step the rules that all tests share: one
finish per sequence and nothing after it, no slot lost, no step without work.
"""

import dataclasses
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logitd.model.inference.attribution.task import Attribution
from logitd.model.inference.circuit.task import Circuit
from logitd.model.inference.constraints.compiler import Compiler, Source
from logitd.model.inference.constraints.protocol import TokenConstraint, TokenMatcher
from logitd.model.inference.engine.attributions import MOST_AT_ONCE
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import (
    AttributionEvent,
    Event,
    FinishEvent,
    FinishReason,
    OutputsChunk,
    PromptEvent,
    ScoresChunk,
    StepResult,
    TokenEvent,
)
from logitd.model.inference.engine.requests import (
    GenerationRequest,
    Logits,
    Output,
    OutputsRequest,
    Request,
    ScoreRequest,
    sequence_lengths,
)
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.engine.scheduler import Scheduler
from logitd.model.inference.engine.sequence import CHUNKS_IN_FLIGHT, State
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.reference import generate, sample_row
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.results import ScoredToken
from logitd.model.transformer.autoencoder import WITHOUT, Autoencoders
from logitd.model.transformer.gpt import GPT
from tests.model.factories import VOCAB_SIZE, byte_tokenizer, tiny_config, tiny_gpt

SMALL_VOCABULARY = 40
LOGITS = Logits()


def small_gpt(**overrides: Any) -> GPT:
    """A GPT for tests that run thousands of steps: `tiny_gpt` with fewer layers, heads, channels
    and ids. The context is 128."""
    shape = {"n_layer": 2, "n_head": 2, "d_model": 16, "vocab_size": SMALL_VOCABULARY}
    return tiny_gpt(tiny_config(**(shape | overrides)))


def params(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    """Sampling parameters, greedy by default."""
    return SamplingParams(**({"max_tokens": max_tokens, "seed": 0, "temperature": 0.0} | fields))


def generation(
    request_id: str,
    prompt: Iterable[int],
    *,
    n: int = 1,
    deadline: float | None = None,
    prompt_logprobs: int | None = None,
    priority: int = 0,
    caller: str = "",
    prefix_reuse: bool = True,
    interventions: tuple[Intervention, ...] = (),
    sampling: SamplingParams | None = None,
    **fields: Any,
) -> GenerationRequest:
    """A request with the given sampling parameters, or with `params(**fields)`."""
    return GenerationRequest(
        request_id=request_id,
        token_ids=tuple(prompt),
        params=sampling or params(**fields),
        n=n,
        deadline=deadline,
        prompt_logprobs=prompt_logprobs,
        priority=priority,
        caller=caller,
        prefix_reuse=prefix_reuse,
        interventions=interventions,
    )


def outputs_request(
    request_id: str,
    prompt: Iterable[int],
    positions: Iterable[int] | None = None,
    *,
    output: Output = LOGITS,
    **fields: Any,
) -> OutputsRequest:
    """A request for output rows, of all positions by default."""
    token_ids = tuple(prompt)
    return OutputsRequest(
        request_id=request_id,
        token_ids=token_ids,
        positions=tuple(range(len(token_ids)) if positions is None else positions),
        output=output,
        **fields,
    )


def score_request(
    request_id: str, prompt: Iterable[int], *continuations: Iterable[int], top: int = 0
) -> ScoreRequest:
    """A request for scores, by default of the prompt itself."""
    return ScoreRequest(
        request_id=request_id,
        token_ids=tuple(prompt),
        continuations=tuple(map(tuple, continuations)),
        top=top,
    )


@dataclass(frozen=True)
class Steps:
    """A constraint on token ids, not on text: each id must equal the token's index in the
    completion, modulo `by`. The constraint is complete after `length` tokens."""

    vocab_size: int
    by: int = 2
    length: int | None = None
    kind: str = "steps"

    def matcher(self) -> "StepsMatcher":
        return StepsMatcher(self)


class StepsMatcher:
    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.place = 0

    def prepare(self) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return self.place == self.steps.length

    def allowed(self) -> np.ndarray:
        return np.arange(self.steps.vocab_size) % self.steps.by == self.place % self.steps.by

    def advance(self, token_id: int) -> None:
        if not self.allowed()[token_id]:
            raise AssertionError(f"{token_id} was drawn at {self.place}")
        self.place += 1


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class JumpingClock(FakeClock):
    """A clock that randomly stops, creeps or leaps between two reads."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def __call__(self) -> float:
        self.now += self._rng.choice([0.0, 1e-4, 1e-3, 1e-2, 1.0, 100.0])
        return self.now


@dataclass
class Outcome:
    """The events of one sequence."""

    tokens: list[TokenEvent] = field(default_factory=list)
    rows: list[OutputsChunk] = field(default_factory=list)
    prompt: list[ScoredToken] = field(default_factory=list)
    scores: list[ScoresChunk] = field(default_factory=list)
    prompt_start: int = 0
    attribution: Attribution | Circuit | None = None
    finish: FinishEvent | None = None

    @property
    def token_ids(self) -> list[int]:
        return [event.token_id for event in self.tokens]

    @property
    def positions(self) -> list[int]:
        return [position for event in self.rows for position in event.positions]

    @property
    def ended(self) -> FinishEvent:
        assert self.finish is not None
        return self.finish

    @property
    def computed(self) -> object:
        """All results of the sequence, bit for bit, and the way it ended."""
        rows = b"".join(event.rows.tobytes() for event in self.rows)
        end = self.ended.reason, self.ended.stop_token_id, self.ended.error
        return self.tokens, self.prompt, self.positions, rows, self.attribution, end

    @property
    def values(self) -> Tensor:
        """All rows of a successful request for outputs."""
        assert self.ended.reason is FinishReason.STOP, self.ended.error
        return torch.cat([torch.from_numpy(event.rows) for event in self.rows])


class Driven:
    """An engine and the record of its events, by request id and index."""

    def __init__(
        self,
        gpt: GPT,
        clock: FakeClock | None = None,
        *,
        make_decoder: DecoderMaker = PlainDecoder,
        autoencoders: Autoencoders = WITHOUT,
        **config: Any,
    ) -> None:
        values = {"slots": 4, "prefill_chunk": 64} | config
        self.clock = clock or FakeClock()
        self.engine = Engine(
            gpt,
            EngineConfig(**values),
            make_decoder=make_decoder,
            clock=self.clock,
            autoencoders=autoencoders,
        )
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.accepted: set[tuple[str, int]] = set()
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.evicted_sequences = 0

    def add(self, *requests: Request, weights: int | None = None) -> None:
        for request in requests:
            if weights is None:
                self.engine.add(request)
            else:
                self.engine.accept(request, weights=weights)
            count = len(sequence_lengths(request))
            self.accepted |= {(request.request_id, index) for index in range(count)}

    def swap_weights(self, gpt: GPT) -> None:
        self.engine.swap_weights(self.engine.prepare_weights(gpt))

    def abort(self, request_id: str, index: int | None = None) -> list[Event]:
        """Abort a request or one of its sequences, and check that the aborted sequences end and no
        others do."""
        before = self.unfinished
        events = self.engine.abort(request_id, index)
        self.record(events)
        gone = {key for key in before if key[0] == request_id and index in (None, key[1])}
        assert self.unfinished == before - gone
        assert all(self.outcomes[key].ended.reason is FinishReason.ABORT for key in gone)
        return events

    def step(self) -> StepResult:
        had_work = self.engine.has_work()
        result = self.engine.step()
        self.record(result.events)
        expired = any(
            isinstance(event, FinishEvent) and event.reason is FinishReason.TIMEOUT
            for event in result.events
        )
        computed = bool(
            result.prefilled_tokens or result.decoded_sequences or result.attribution_pieces
        )
        compiles = any(sequence.matcher for sequence in self.engine._scheduler.running)
        assert computed == had_work or expired or (had_work and compiles), "has_work was wrong"
        self.drafted_tokens += result.drafted_tokens
        self.accepted_tokens += result.accepted_tokens
        self.evicted_sequences += result.evicted_sequences
        check_integrity(self.engine)
        stats = self.engine.stats()
        assert stats.waiting + stats.running + stats.paused == len(self.unfinished)
        assert stats.paused <= min(stats.slots, self.evicted_sequences)
        return result

    def drain(self) -> dict[tuple[str, int], Outcome]:
        """Step until no work is left, and grant credit for each piece of rows when it arrives."""
        for _ in range(10_000):
            if not self.engine.has_work():
                break
            for event in self.step().events:
                if isinstance(event, OutputsChunk):
                    self.engine.grant(event.request_id)
        assert not self.unfinished, "the engine has no work although a request waits"
        return self.outcomes

    def record(self, events: Iterable[Event]) -> None:
        for event in events:
            index = 0 if isinstance(event, OutputsChunk) else event.index
            key = (event.request_id, index)
            outcome = self.outcomes.setdefault(key, Outcome())
            assert outcome.finish is None, f"{event} came after the finish of {key}"
            if isinstance(event, TokenEvent):
                outcome.tokens.append(event)
            elif isinstance(event, OutputsChunk):
                outcome.rows.append(event)
            elif isinstance(event, PromptEvent):
                if not outcome.prompt:
                    outcome.prompt_start = event.start
                assert event.start == outcome.prompt_start + len(outcome.prompt)
                assert not outcome.tokens, "a prompt's logprobs come before its tokens"
                outcome.prompt.extend(event.tokens)
            elif isinstance(event, ScoresChunk):
                outcome.scores.append(event)
            elif isinstance(event, AttributionEvent):
                assert outcome.attribution is None, "attributions are told once"
                outcome.attribution = event.attribution
            else:
                outcome.finish = event
                assert event.completion_tokens == len(outcome.tokens)
                times = event.times
                moments = (times.arrived, times.admitted, times.prefilled, times.finished)
                known = [moment for moment in moments if moment is not None]
                assert known == sorted(known)

    @property
    def unfinished(self) -> set[tuple[str, int]]:
        return {
            key
            for key in self.accepted
            if key not in self.outcomes or self.outcomes[key].finish is None
        }


def check_scheduler(scheduler: Scheduler) -> None:
    """Every slot has at most one owner, and every running sequence has one slot."""
    running, waiting, paused = scheduler.running, list(scheduler.waiting), scheduler.paused
    slots = [sequence.slot for sequence in running]
    assert len(slots) == len(set(slots)), f"a slot is shared: {slots}"
    assert set(slots) == scheduler.slots.owned()
    assert all(s.state in (State.PREFILL, State.DECODE) for s in running)
    assert len(waiting) == len(set(waiting)) == len(scheduler.waiting)
    assert all(s.state is State.WAITING and s.slot is None for s in waiting)
    assert all(s.state is State.PAUSED and s.slot is None for s in paused)
    assert all(s.credit < CHUNKS_IN_FLIGHT for s in paused)
    assert len(paused) <= scheduler.slots.total
    assert set(scheduler._behind) == {s for s in running if not s.may_compute}
    attributions = scheduler.attributions
    assert len(attributions.running) <= MOST_AT_ONCE
    assert all(s.state is State.ATTRIBUTION and s.slot is None for s in attributions.running)
    assert all(s.state is State.WAITING and s.slot is None for s in attributions.waiting)


def check_integrity(engine: Engine) -> None:
    """No slot and no sequence is lost or shared."""
    scheduler = engine._scheduler
    check_scheduler(scheduler)
    known = {s for sequences in engine._sequences.values() for s in sequences}
    assert known == {
        *(*scheduler.waiting, *scheduler.running, *scheduler.paused),
        *(*scheduler.attributions.waiting, *scheduler.attributions.running),
    }


def run(gpt: GPT, *requests: Request, **config: Any) -> dict[tuple[str, int], Outcome]:
    """Run all requests at once on a new engine."""
    driven = Driven(gpt, **config)
    driven.add(*requests)
    return driven.drain()


def skip_unless_rows_depend_on_their_number() -> None:
    """Skip the test if this machine's matrix products give a row the same bits alone and in a
    batch. On such a machine, no test can detect that padding rows are missing."""
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(96, 48, generator=torch.Generator().manual_seed(1))
    if torch.equal(x[:1] @ weight.T, (x @ weight.T)[:1]):
        pytest.skip("this machine's matrix product gives one row the same bits as four")


def random_prompt(rng: random.Random, length: int, vocab_size: int = SMALL_VOCABULARY) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


@cache
def text_constraints() -> tuple[TokenConstraint, ...]:
    """Three constraints for the byte vocabulary: one ends texts early, one ends them late, and one
    lets them end anywhere."""
    compiler = Compiler(byte_tokenizer())
    expressions = ("[ab]{2,4}", "(?:x|[0-9]{3})*", ".{500}")
    return tuple(compiler.compile(Source("regex", expression)) for expression in expressions)


def random_constraint(rng: random.Random, max_tokens: int, vocab_size: int) -> TokenConstraint:
    if vocab_size == VOCAB_SIZE and rng.random() < 0.5:
        return rng.choice(text_constraints())
    length = rng.choice([None, rng.randint(1, max(1, max_tokens))])
    return Steps(vocab_size, rng.randint(1, 4), length)


def random_params(rng: random.Random, max_tokens: int, vocab_size: int) -> SamplingParams:
    """Random parameters. Each one is off about half the time; a constraint is off more often."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    def ids(count: int) -> list[int]:
        return rng.sample(range(vocab_size), count)

    mixed = SamplingParams(
        max_tokens=max_tokens,
        seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 1.7]),
        top_k=maybe(rng.randint(1, vocab_size + 2), 0),
        top_p=maybe(rng.uniform(0.2, 0.99), 1.0),
        min_p=maybe(rng.uniform(0.001, 0.3), 0.0),
        repetition_penalty=maybe(rng.uniform(0.7, 1.5), 1.0),
        presence_penalty=maybe(rng.uniform(-1, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-1, 2), 0.0),
        logit_bias=maybe({token_id: rng.uniform(-5, 5) for token_id in ids(3)}, {}),
        allowed_token_ids=maybe(tuple(ids(vocab_size // 2)), None),
        stop_token_ids=frozenset(maybe(ids(2), [])),
        min_tokens=maybe(rng.randint(0, max_tokens), 0),
        logprobs=rng.choice([None, 0, 3]),
        logprobs_stage=rng.choice(["raw", "processed"]),
    )
    if mixed.seed % 4:
        return mixed
    constraint = random_constraint(random.Random(mixed.seed), max_tokens, vocab_size)
    return dataclasses.replace(mixed, constraint=constraint, allowed_token_ids=None, min_tokens=0)


def assert_is_reference(
    gpt: GPT, prompt: Sequence[int], sampling: SamplingParams, index: int, tokens: list[int]
) -> None:
    """Compare a completion with `reference.generate`, token for token.

    They may diverge only at a token that rounding decides: shifting the reference's logits by
    float32's tolerance makes it draw either token.
    """
    expected = generate(gpt, prompt, sampling, index)
    if tokens == expected:
        return
    common = next(
        i for i in range(len(expected) + 1) if tokens[: i + 1] != expected[: i + 1]
    )  # the first token that differs
    text = [*prompt, *expected[:common]]
    allowed = None
    if sampling.constraint is not None:
        allowed = advanced(sampling.constraint, expected[:common]).allowed().tolist()
    with torch.inference_mode():
        logits = gpt(torch.tensor([text])).logits[0, -1].double()
    noise = torch.Generator().manual_seed(0)
    drawn = {
        sample_row(
            (logits + 1e-4 * torch.randn(logits.shape, generator=noise)).tolist(),
            text,
            len(prompt),
            sampling,
            index,
            allowed,
        )
        for _ in range(50)
    }
    assert {tokens[common], expected[common]} <= drawn, f"{tokens} is not {expected}"


def advanced(constraint: TokenConstraint, token_ids: Iterable[int]) -> TokenMatcher:
    """A new matcher, advanced over a completion."""
    matcher = constraint.matcher()
    for token_id in token_ids:
        matcher.advance(token_id)
    return matcher


def constraint_is_complete(sampling: SamplingParams, token_ids: Iterable[int]) -> bool:
    """True if a constraint allows nothing after a completion."""
    constraint = sampling.constraint
    return constraint is not None and advanced(constraint, token_ids).complete


def counts(engine: Engine) -> tuple[int, int, int, int]:
    """Numbers of waiting and running sequences, of slots, and of used slots."""
    stats = engine.stats()
    return stats.waiting, stats.running, stats.slots, stats.slots_used
