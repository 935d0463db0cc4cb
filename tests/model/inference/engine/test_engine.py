"""Engine: what it answers is what `inference/reference.py` says, whatever else it is doing."""

import dataclasses
import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from model.inference.engine.config import EngineConfig
from model.inference.engine.engine import Engine
from model.inference.engine.events import Event, FinishEvent, FinishReason, OutputsChunk, TokenEvent
from model.inference.engine.requests import (
    GenerationRequest,
    Logits,
    OutputsRequest,
    Request,
    ScoreRequest,
)
from model.inference.engine.sequence import ROWS_CREDIT, Sequence
from model.inference.errors import InvalidRequest
from model.inference.sampling.params import SamplingParams
from model.transformer.attention import Attend
from model.transformer.gpt import GPT
from tests.model.factories import FAMILIES
from tests.model.inference.engine.harness import (
    SMALL_VOCABULARY,
    Driven,
    FakeClock,
    Outcome,
    assert_is_reference,
    constraint_is_complete,
    counts,
    generation,
    outputs_request,
    params,
    random_params,
    random_prompt,
    run,
    score_request,
    small_gpt,
)


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return small_gpt()


def logits_of(gpt: GPT, tokens: list[int]) -> Tensor:
    """The plain forward's logits (T, V)."""
    with torch.inference_mode():
        return gpt(torch.tensor([tokens])).logits[0]


# Against the reference


def check_generation(gpt: GPT, request: GenerationRequest, index: int, outcome: Outcome) -> None:
    """Tokens, logprobs, reason and counts of one sequence, finished or aborted."""
    prompt, sampling, end = list(request.token_ids), request.params, outcome.ended
    tokens = outcome.token_ids
    if end.reason is FinishReason.ABORT:  # what was there until then
        if tokens:
            cut = dataclasses.replace(sampling, max_tokens=len(tokens), min_tokens=0)
            if not sampling.min_tokens:
                assert_is_reference(gpt, prompt, cut, index, tokens)
    else:
        assert_is_reference(gpt, prompt, sampling, index, tokens)
        stopped = tokens[-1] in sampling.stop_token_ids
        whole = constraint_is_complete(sampling, tokens)
        assert end.reason is (FinishReason.STOP if stopped or whole else FinishReason.LENGTH)
        assert end.stop_token_id == (tokens[-1] if stopped else None)
        assert stopped or whole or len(tokens) == sampling.max_tokens
        assert not set(tokens[:-1]) & sampling.stop_token_ids
    assert (end.prompt_tokens, end.completion_tokens) == (len(prompt), len(tokens))
    assert end.error is None
    logprobs = logits_of(gpt, prompt + tokens).log_softmax(dim=-1)
    for i, event in enumerate(outcome.tokens):
        assert (event.chosen is not None) == (sampling.logprobs is not None)
        assert len(event.top) <= (sampling.logprobs or 0)
        if sampling.logprobs_stage == "raw":
            row = logprobs[len(prompt) + i - 1]
            for token in (*((event.chosen,) if event.chosen else ()), *event.top):
                assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-3)


def check_rows(gpt: GPT, request: OutputsRequest, outcome: Outcome) -> None:
    expected = logits_of(gpt, list(request.token_ids))[list(request.positions)]
    assert isinstance(request.output, Logits)
    if request.output.columns is not None:
        expected = expected[:, list(request.output.columns)]
    positions = outcome.positions
    if outcome.ended.reason is FinishReason.ABORT:
        assert tuple(positions) == request.positions[: len(positions)]
    else:
        assert outcome.ended.reason is FinishReason.STOP
        assert tuple(positions) == request.positions
    assert outcome.ended.completion_tokens == 0
    if positions:
        rows = torch.cat([torch.from_numpy(event.rows) for event in outcome.rows])
        assert rows.dtype == torch.float32
        assert_close(rows, expected[: len(positions)], atol=2e-3, rtol=1e-3)


def check_score(gpt: GPT, request: ScoreRequest, index: int, outcome: Outcome) -> None:
    continuation = request.continuations[index] if request.continuations else ()
    text = [*request.token_ids, *continuation]
    start = len(request.token_ids) if continuation else 0
    assert [token.token_id for token in outcome.prompt] == text[start:]
    logprobs = logits_of(gpt, text).double().log_softmax(dim=-1)
    for position, token in enumerate(outcome.prompt, start=start):
        for one in (*((token.chosen,) if token.chosen else ()), *token.top):
            expected = logprobs[position - 1, one.token_id].item()
            assert one.logprob == pytest.approx(expected, abs=2e-3)


def random_request(rng: random.Random, name: str, gpt: GPT, shared: list[int]) -> Request:
    """Any request that fits; half of the prompts start with a piece of `shared`."""
    context, vocab_size = gpt.config.context_length, gpt.config.vocab_size
    length = rng.randint(1, context - 1)
    prompt = random_prompt(rng, length, vocab_size)
    if rng.random() < 0.5:
        common = rng.randint(0, length)
        prompt[:common] = shared[:common]
    if rng.random() < 0.25:
        positions = sorted(rng.sample(range(length), rng.randint(1, length)))
        columns = tuple(random_prompt(rng, 3, vocab_size)) if rng.random() < 0.5 else None
        return outputs_request(name, prompt, positions, columns=columns)
    if rng.random() < 0.1:
        room = context - length
        continuations = [random_prompt(rng, rng.randint(1, room), vocab_size) for _ in range(2)]
        return score_request(name, prompt, *continuations[: rng.randint(0, 2)], top=2)
    sampling = random_params(rng, rng.randint(1, min(20, context - length)), vocab_size)
    return generation(name, prompt, n=rng.choice([1, 1, 1, 2, 3]), sampling=sampling)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_is_what_the_reference_says(family: str, seed: int) -> None:
    """Random prompts, lengths, arrival times, n, samplers and aborts on a random engine."""
    rng = random.Random(f"{family} {seed}")
    gpt = small_gpt(**FAMILIES[family], context_length=rng.choice([50, 100, 128]))
    driven = Driven(
        gpt, slots=rng.randint(1, 6), prefill_chunk=32 * rng.randint(1, 4), prefix_reuse=seed < 2
    )
    shared = random_prompt(rng, gpt.config.context_length)
    requests = {name: random_request(rng, name, gpt, shared) for name in "abcdefghij"}
    for request in requests.values():
        driven.add(request)
        for _ in range(rng.choice([0, 0, 1, 5])):
            for event in driven.step().events:
                if isinstance(event, OutputsChunk):
                    driven.engine.grant(event.request_id)
        if rng.random() < 0.15:
            name = rng.choice([*requests])
            driven.abort(name, rng.choice([None, 0, 1]))
    outcomes = driven.drain()
    assert outcomes.keys() == driven.accepted
    for (name, index), outcome in outcomes.items():
        request = requests[name]
        if isinstance(request, GenerationRequest):
            check_generation(gpt, request, index, outcome)
        elif isinstance(request, OutputsRequest):
            check_rows(gpt, request, outcome)
        elif outcome.ended.reason is FinishReason.STOP:
            check_score(gpt, request, index, outcome)


def test_greedy_text_fills_the_context_to_its_end(gpt: GPT) -> None:
    for length in (1, 31, 32, 33, 127):
        prompt = random_prompt(random.Random(length), length)
        request = generation("a", prompt, max_tokens=128 - length)
        outcome = run(gpt, request)["a", 0]
        assert len(outcome.tokens) == 128 - length
        assert_is_reference(gpt, prompt, request.params, 0, outcome.token_ids)


def test_the_n_of_a_prompt_are_n_different_texts(gpt: GPT) -> None:
    request = generation("a", range(40), n=4, seed=7, temperature=3.0, max_tokens=12)
    outcomes = run(gpt, request)
    texts = [outcomes["a", index].token_ids for index in range(4)]
    assert len({tuple(text) for text in texts}) == 4
    for index, text in enumerate(texts):
        assert_is_reference(gpt, list(range(40)), request.params, index, text)


def test_a_finished_request_leaves_nothing_in_the_next_one(gpt: GPT) -> None:
    """One slot, used again and again for shorter and longer texts."""
    driven = Driven(gpt, slots=1)
    rng = random.Random(0)
    for i, length in enumerate([100, 3, 70, 33, 5, 96]):
        prompt = random_prompt(rng, length)
        driven.add(generation(str(i), prompt, max_tokens=10))
        driven.drain()
        outcome = driven.outcomes[str(i), 0]
        assert_is_reference(gpt, prompt, params(10), 0, outcome.token_ids)


# Steps, events and counts


def test_a_prompt_gives_its_first_token_when_it_is_computed(gpt: GPT) -> None:
    driven = Driven(gpt, prefill_chunk=32)
    driven.add(generation("a", [1] * 70, max_tokens=3))
    steps = [driven.step() for _ in range(5)]
    assert [step.prefilled_tokens for step in steps] == [32, 32, 6, 0, 0]
    assert [step.decoded_sequences for step in steps] == [0, 0, 0, 1, 1]
    kinds = [[type(event) for event in step.events] for step in steps]
    assert kinds == [[], [], [TokenEvent], [TokenEvent], [TokenEvent, FinishEvent]]
    assert not driven.engine.has_work()


@pytest.mark.parametrize("speculate", ["none", "ngram"])
def test_everything_that_was_computed_is_counted(gpt: GPT, speculate: str) -> None:
    driven = Driven(gpt, slots=3, speculate=speculate)
    rng = random.Random(1)
    shared = random_prompt(rng, 128)
    for name in "abcdefghijkl":
        driven.add(random_request(rng, name, gpt, shared))
    prefilled = decoded = 0
    while driven.engine.has_work():
        result = driven.step()
        for event in result.events:
            if isinstance(event, OutputsChunk):
                driven.engine.grant(event.request_id)
        prefilled += result.prefilled_tokens
        decoded += result.decoded_sequences
    ends = [outcome.ended for outcome in driven.outcomes.values()]
    assert prefilled == sum(end.prompt_tokens - end.cached_tokens for end in ends)
    beyond_the_first = sum(max(0, end.completion_tokens - 1) for end in ends)
    assert decoded + driven.accepted_tokens == beyond_the_first
    assert any(end.cached_tokens for end in ends)


def test_a_step_without_work_does_nothing(gpt: GPT) -> None:
    driven = Driven(gpt)
    assert not driven.engine.has_work()
    result = driven.step()
    assert (result.events, result.prefilled_tokens, result.decoded_sequences) == ((), 0, 0)


def test_every_moment_is_on_the_engines_clock(gpt: GPT) -> None:
    clock = FakeClock()
    driven = Driven(gpt, clock, slots=1, prefill_chunk=32)
    driven.add(generation("first", [1] * 40, max_tokens=3))
    driven.add(generation("second", [2], max_tokens=1))
    while driven.engine.has_work():
        clock.now += 1
        driven.step()
    first, second = (driven.outcomes[name, 0].ended.times for name in ("first", "second"))
    assert dataclasses.astuple(first) == (100, 101, 102, 104)
    assert dataclasses.astuple(second) == (100, 105, 105, 105)
    driven.engine.add(generation("third", [2], max_tokens=1), arrived=42.0)
    driven.accepted.add(("third", 0))
    driven.drain()
    assert driven.outcomes["third", 0].ended.times.arrived == 42.0


def test_a_shared_prefix_is_copied_and_counted(gpt: GPT) -> None:
    prompt = random_prompt(random.Random(3), 100)
    driven = Driven(gpt)
    for name, token_ids in {
        "cold": prompt,
        "warm": prompt,
        "longer": [*prompt, 1, 2, 3],
        "shorter": prompt[:64],
        "parted": [*prompt[:40], *prompt[:40]],
    }.items():
        driven.add(generation(name, token_ids, max_tokens=20))
        driven.drain()
    cached = {name: outcome.ended.cached_tokens for (name, _), outcome in driven.outcomes.items()}
    assert cached == {"cold": 0, "warm": 96, "longer": 96, "shorter": 32, "parted": 32}
    for (name, _), outcome in driven.outcomes.items():
        if name in ("cold", "warm"):
            assert_is_reference(gpt, prompt, params(20), 0, outcome.token_ids)


def test_stats(gpt: GPT) -> None:
    driven = Driven(gpt, slots=2)
    engine = driven.engine
    assert engine.slots == 2
    assert engine.kv_cache_bytes == 2 * 2 * 2 * 2 * 128 * 8 * 4
    for i in range(5):
        driven.add(generation(str(i), [i], max_tokens=9))
    assert counts(engine) == (5, 0, 2, 0)
    driven.step()
    assert counts(engine) == (3, 2, 2, 2)
    assert engine.stats().running_tokens == 2, "two prompts of a token each"
    driven.drain()
    assert counts(engine) == (0, 0, 2, 0)


# Rows


def test_rows_come_in_pieces_as_they_are_granted(gpt: GPT) -> None:
    driven = Driven(gpt, prefill_chunk=128)
    driven.engine._scheduler.rows_budget = 1  # pieces of one block
    request = outputs_request("rows", random_prompt(random.Random(0), 120))
    driven.add(request)
    driven.add(generation("other", [3], max_tokens=20))
    while driven.engine.has_work():
        driven.step()
    assert driven.outcomes["other", 0].ended.reason is FinishReason.LENGTH
    pieces = driven.outcomes["rows", 0].rows
    assert [event.positions for event in pieces] == [tuple(range(32)), tuple(range(32, 64))]
    assert len(pieces) == ROWS_CREDIT
    driven.engine.grant("rows")
    assert driven.engine.has_work()
    driven.step()
    assert not driven.engine.has_work()
    assert len(pieces) == ROWS_CREDIT + 1
    driven.engine.grant("rows")
    driven.drain()
    check_rows(gpt, request, driven.outcomes["rows", 0])


def test_a_grant_for_nobody_is_harmless(gpt: GPT) -> None:
    Driven(gpt).engine.grant("nobody")


def test_a_granted_row_does_not_wait_for_others(gpt: GPT) -> None:
    driven = Driven(gpt, slots=3, prefill_chunk=64)
    driven.engine._scheduler.rows_budget = 1
    for name in ("slow", "quick"):
        driven.add(outputs_request(name, random_prompt(random.Random(0), 128)))
    while driven.engine.has_work():
        for event in driven.step().events:
            if event.request_id == "quick":
                driven.engine.grant("quick")
    assert driven.outcomes["quick", 0].ended.reason is FinishReason.STOP
    assert driven.unfinished == {("slow", 0)}
    driven.abort("slow")


# Refusals

PROMPT = list(range(30))


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (generation("a", []), "prompt", "the prompt is empty; give at least one token"),
        (outputs_request("a", [], [0]), "prompt", "the prompt is empty; give at least one token"),
        (
            generation("a", [0, 40]),
            "prompt",
            r"token id 40 in prompt is outside the vocabulary of 40 ids \(0 to 39\)",
        ),
        (outputs_request("a", [-1]), "prompt", "token id -1 in prompt is outside"),
        (
            generation("a", PROMPT, max_tokens=99),
            "prompt",
            "the prompt has 30 tokens and max_tokens is 99: together 129, the model's context is "
            "128. Shorten the prompt by 1 token or lower max_tokens to 98$",
        ),
        (
            generation("a", [1] * 128, max_tokens=1),
            "prompt",
            "the prompt has 128 tokens; the model's context is 128 and at least one token must be "
            "left for the completion. Shorten the prompt by 1 token$",
        ),
        (
            outputs_request("a", [1] * 129, [0]),
            "prompt",
            "the prompt has 129 tokens; the model's context is 128. Shorten it by 1 token$",
        ),
        (generation("a", PROMPT, n=0), "n", "n is 0; it must be at least 1"),
        (
            generation("a", PROMPT, logit_bias={40: 1.0}),
            "logit_bias",
            "token id 40 in logit_bias is outside the vocabulary of 40 ids",
        ),
        (
            generation("a", PROMPT, allowed_token_ids=(3, 41)),
            "allowed_token_ids",
            "token id 41 in allowed_token_ids is outside",
        ),
        (
            generation("a", PROMPT, stop_token_ids=frozenset({-2})),
            "stop_token_ids",
            "token id -2 in stop_token_ids is outside",
        ),
        (
            generation("a", PROMPT, stop_token_ids=frozenset(range(40)), min_tokens=1),
            "min_tokens",
            "stop_token_ids holds all 40 ids, which min_tokens forbids",
        ),
        (
            generation("a", PROMPT, logprobs=41),
            "logprobs",
            "logprobs is 41; the vocabulary has 40 ids",
        ),
        (
            outputs_request("a", PROMPT, []),
            "positions",
            r"positions \[\] must be ascending, distinct and at least one",
        ),
        (
            outputs_request("a", PROMPT, [3, 2]),
            "positions",
            r"positions \[3, 2\] must be ascending, distinct",
        ),
        (
            outputs_request("a", PROMPT, [3, 3]),
            "positions",
            r"positions \[3, 3\] must be ascending, distinct",
        ),
        (
            outputs_request("a", PROMPT, [-1, 5]),
            "positions",
            r"positions has -1; the prompt has 30 tokens \(0 to 29\)",
        ),
        (outputs_request("a", PROMPT, [30]), "positions", "positions has 30; the prompt has 30"),
        (
            outputs_request("a", PROMPT, [0], columns=(40,)),
            "token_ids",
            "token id 40 in token_ids is outside the vocabulary",
        ),
        (
            outputs_request("a", PROMPT, [0], columns=()),
            "token_ids",
            "token_ids is empty; choose at least one",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(
    gpt: GPT, request_: Request, param: str, message: str
) -> None:
    driven = Driven(gpt)
    with pytest.raises(InvalidRequest, match=message) as refusal:
        driven.add(request_)
    assert refusal.value.param == param
    assert not driven.engine.has_work()
    driven.engine.check_integrity()


def test_what_just_fits_is_accepted(gpt: GPT) -> None:
    everything = frozenset(range(SMALL_VOCABULARY))
    outcomes = run(
        gpt,
        generation("full", [1] * 127, max_tokens=1, logprobs=40),
        generation("stops", PROMPT, stop_token_ids=everything),
        generation("last id", [39], logit_bias={39: 1.0}, allowed_token_ids=(39,)),
        outputs_request("rows", [1] * 128, [0, 127], columns=(39, 0, 39)),
    )
    assert all(outcome.ended.error is None for outcome in outcomes.values())
    assert len(outcomes["full", 0].tokens[0].top) == 40
    assert outcomes["stops", 0].ended.completion_tokens == 1
    assert outcomes["last id", 0].token_ids == [39] * 8


def test_a_request_id_is_used_once_at_a_time(gpt: GPT) -> None:
    driven = Driven(gpt)
    driven.add(generation("a", [1]))
    with pytest.raises(InvalidRequest, match="request id 'a' is in use"):
        driven.add(outputs_request("a", [1]))
    driven.drain()
    engine = driven.engine
    engine.add(generation("a", [1], max_tokens=1))
    assert [event.request_id for event in engine.step().events] == ["a", "a"]


# Ends


def busy(gpt: GPT, clock: FakeClock | None = None, deadline: float | None = None) -> Driven:
    """Two slots: 'decode' is running, 'prefill' has a chunk to go, 'queued' waits."""
    driven = Driven(gpt, clock, slots=2, prefill_chunk=32)
    driven.add(generation("decode", [1], max_tokens=100, deadline=deadline))
    driven.step()
    driven.add(generation("prefill", [2] * 90, deadline=deadline))
    driven.add(generation("queued", [3], deadline=deadline))
    driven.step()
    assert counts(driven.engine) == (1, 2, 2, 2)
    return driven


@pytest.mark.parametrize("name", ["decode", "prefill", "queued"])
def test_an_abort_ends_a_request_at_once(gpt: GPT, name: str) -> None:
    driven = busy(gpt)
    driven.abort(name)
    end = driven.outcomes[name, 0].ended
    assert end.reason is FinishReason.ABORT
    assert end.completion_tokens == (2 if name == "decode" else 0)
    driven.engine.check_integrity()
    driven.step()  # ... and its slot is free in the next step
    queued = driven.outcomes.get(("queued", 0))
    assert (name == "prefill") == (queued is not None and bool(queued.tokens))
    driven.drain()
    others = {key[0]: outcome.ended.reason for key, outcome in driven.outcomes.items()}
    del others[name]
    assert set(others.values()) == {FinishReason.LENGTH}
    assert driven.engine.abort(name) == []  # twice is once


def test_an_abort_of_one_leaves_its_siblings(gpt: GPT) -> None:
    driven = Driven(gpt, slots=2)
    driven.add(generation("a", [1] * 40, n=4, max_tokens=6))
    driven.step()
    driven.step()
    for index in (1, 3):
        driven.abort("a", index)
    assert driven.engine.abort("a", 1) == []
    assert driven.engine.abort("a", 9) == []
    assert driven.engine.abort("b") == []
    outcomes = driven.drain()
    reasons = [outcomes["a", index].ended.reason.value for index in range(4)]
    assert reasons == ["length", "abort", "length", "abort"]
    assert outcomes["a", 0].token_ids == outcomes["a", 2].token_ids  # greedy


def test_a_deadline_ends_a_request_in_every_state(gpt: GPT) -> None:
    clock = FakeClock()
    driven = busy(gpt, clock, deadline=110.0)
    driven.add(generation("patient", [4], deadline=120.0))
    driven.add(generation("endless", [5]))
    assert driven.engine.next_deadline() == 110.0
    clock.now = 109.9
    driven.step()
    assert driven.unfinished >= {("decode", 0), ("prefill", 0), ("queued", 0)}
    clock.now = 110.0
    result = driven.step()
    expired = [e for e in result.events if isinstance(e, FinishEvent)]
    assert {event.request_id for event in expired} == {"decode", "prefill", "queued"}
    assert {event.reason for event in expired} == {FinishReason.TIMEOUT}
    assert {event.times.finished for event in expired} == {110.0}
    assert result.prefilled_tokens == 1  # the slots were free at once
    assert driven.engine.stats().running == 2
    assert driven.engine.next_deadline() == 120.0
    driven.drain()
    assert driven.engine.next_deadline() is None
    assert driven.outcomes["patient", 0].ended.reason is FinishReason.LENGTH


def test_a_deadline_ends_all_siblings_and_a_paused_reader(gpt: GPT) -> None:
    clock = FakeClock()
    driven = Driven(gpt, clock)
    driven.engine._scheduler.rows_budget = 1
    driven.add(generation("a", [1], n=3, max_tokens=100, deadline=101.0))
    driven.add(outputs_request("rows", [2] * 128, deadline=102.0))
    for _ in range(5):
        driven.step()
    clock.now = 103.0
    driven.step()
    assert driven.unfinished == set()
    reasons = [outcome.ended.reason for outcome in driven.outcomes.values()]
    assert reasons == [FinishReason.TIMEOUT] * 4
    assert not driven.engine.has_work()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_token_ends_the_text_and_belongs_to_it(gpt: GPT, temperature: float) -> None:
    prompt = random_prompt(random.Random(5), 20)
    free = params(30, temperature=temperature, seed=4)
    text = run(gpt, generation("a", prompt, sampling=free))["a", 0].token_ids
    stop = text[10]
    stopping = dataclasses.replace(free, stop_token_ids=frozenset({stop}))
    outcome = run(gpt, generation("a", prompt, sampling=stopping))["a", 0]
    assert outcome.token_ids == text[: text.index(stop) + 1]
    assert outcome.ended.reason is FinishReason.STOP
    assert outcome.ended.stop_token_id == stop


def test_a_stop_token_that_is_also_the_last_is_a_stop(gpt: GPT) -> None:
    text = run(gpt, generation("a", [1, 2], max_tokens=4))["a", 0].token_ids
    last = frozenset({text[-1]})
    first = text.index(text[-1])
    outcome = run(gpt, generation("a", [1, 2], max_tokens=first + 1, stop_token_ids=last))["a", 0]
    assert outcome.token_ids == text[: first + 1]
    assert outcome.ended.reason is FinishReason.STOP


# Failures


class FailingGPT(GPT):
    """A GPT whose forward raises at given calls."""

    calls = 0
    fails_at: frozenset[int] = frozenset()

    def transform(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        self.calls += 1
        if self.calls in self.fails_at:
            # The step wrote something before it failed.
            super().transform(token_ids, positions, attend, states)
            raise RuntimeError(f"no memory left for call {self.calls}")
        return super().transform(token_ids, positions, attend, states)


def failing_gpt(gpt: GPT, *fails_at: int) -> FailingGPT:
    failing = FailingGPT(gpt.config)
    failing.load_state_dict(gpt.state_dict())
    failing.fails_at = frozenset(fails_at)
    return failing.eval().requires_grad_(False)


def finishes(events: tuple[Event, ...]) -> dict[str, FinishEvent]:
    return {event.request_id: event for event in events if isinstance(event, FinishEvent)}


@pytest.mark.parametrize("fails_in", ["prefill", "decode"])
def test_a_failed_forward_fails_the_requests_of_its_step(gpt: GPT, fails_in: str) -> None:
    """Of five requests, two are in the failed step; the other three never notice."""
    rng = random.Random(8)
    prompts = {name: random_prompt(rng, 100) for name in ("prefill", "admitted", "queued")}
    # Step 1 calls once (prefill), step 2 twice (prefill, decode): the second step fails.
    driven = Driven(failing_gpt(gpt, 2 if fails_in == "prefill" else 3), slots=3, prefill_chunk=32)
    driven.add(generation("decode", [1], max_tokens=50))
    driven.step()
    for name, prompt in prompts.items():
        driven.add(generation(name, prompt))
    failed = finishes(driven.step().events)
    assert failed.keys() == {"decode", "prefill"}
    for event in failed.values():
        assert event.reason is FinishReason.ERROR
        assert event.error is not None
        assert event.error.startswith("the model failed: RuntimeError: no memory left for call")
    outcomes = driven.drain()
    for name in ("admitted", "queued"):
        assert outcomes[name, 0].ended.reason is FinishReason.LENGTH
        assert_is_reference(gpt, prompts[name], params(), 0, outcomes[name, 0].token_ids)


def test_nothing_of_a_failed_step_is_shared(gpt: GPT) -> None:
    """A failed step may have left anything in the cache: prompts that could have copied from it,
    or from what was there before, are computed."""
    prompt = random_prompt(random.Random(9), 100)
    driven = Driven(failing_gpt(gpt, 3, 5), slots=3, prefill_chunk=64)
    driven.add(generation("first", prompt, max_tokens=1))  # calls 1 and 2
    driven.drain()
    driven.add(generation("fails", [*prompt, 5]))  # call 3
    driven.step()
    assert driven.outcomes["fails", 0].ended.reason is FinishReason.ERROR
    driven.add(generation("half", prompt))  # calls 4 and 5: half of it is computed, then it fails
    driven.step()
    driven.step()
    assert driven.outcomes["half", 0].ended.reason is FinishReason.ERROR
    driven.add(generation("good", prompt))
    driven.drain()
    good = driven.outcomes["good", 0]
    assert good.ended.cached_tokens == 0
    assert_is_reference(gpt, prompt, params(), 0, good.token_ids)
    driven.add(generation("again", prompt))  # ... and what has been computed since is shared
    assert driven.drain()["again", 0].ended.cached_tokens == 96


def test_a_failed_step_does_not_touch_a_paused_reader(gpt: GPT) -> None:
    driven = Driven(failing_gpt(gpt, 3), slots=2, prefill_chunk=32)
    request = outputs_request("rows", random_prompt(random.Random(0), 100))
    driven.add(request)
    driven.step()
    driven.step()
    driven.add(generation("fails", [1]))
    assert finishes(driven.step().events).keys() == {"fails"}
    driven.engine.grant("rows")
    driven.engine.grant("rows")
    driven.drain()
    check_rows(gpt, request, driven.outcomes["rows", 0])


def test_a_model_that_always_fails_answers_everybody(gpt: GPT) -> None:
    driven = Driven(failing_gpt(gpt, *range(1, 100)), slots=2)
    for i in range(10):
        driven.add(generation(str(i), [1] * 40, n=2))
        driven.add(outputs_request(f"rows {i}", [1] * 40))
    outcomes = driven.drain()
    assert len(outcomes) == 30
    assert {outcome.ended.reason for outcome in outcomes.values()} == {FinishReason.ERROR}


def test_numbers_that_are_not_finite_fail_their_sequence_alone() -> None:
    """A token whose embedding is NaN spoils the texts that hold it, and nothing else, neither
    beside it nor later in its slot."""
    clean = small_gpt(tied_head=False)
    broken = small_gpt(tied_head=False)
    broken.token_embedding.weight[7] = torch.nan
    rng = random.Random(10)
    prompts = [[token % 7 for token in random_prompt(rng, length)] for length in (40, 5, 70)]
    allowed = tuple(range(7))

    def ask(i: int) -> GenerationRequest:
        return generation(
            str(i), prompts[i], seed=i, temperature=1.0, logprobs=3, allowed_token_ids=allowed
        )

    expected = run(clean, *(ask(i) for i in range(3)))
    driven = Driven(broken, slots=2)
    driven.add(ask(0))
    driven.add(generation("spoilt", [1, 2, 7, 3]))
    driven.add(ask(1))
    driven.add(ask(2))
    outcomes = driven.drain()
    end = outcomes["spoilt", 0].ended
    assert end.reason is FinishReason.ERROR
    assert end.error == "the model computed logits that are not finite for this sequence"
    assert end.completion_tokens == 0
    for i in range(3):
        assert outcomes[str(i), 0].tokens == expected[str(i), 0].tokens


# Endurance


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


def test_two_thousand_requests_leave_nothing_behind() -> None:
    endure(2000, seed=0)


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    endure(10_000, seed=1)


def test_config_bounds_what_an_engine_holds(gpt: GPT) -> None:
    """Never more running than slots, never more prefilled in a step than the chunk."""
    config: dict[str, Any] = {"slots": 3, "prefill_chunk": 32}
    driven = Driven(gpt, **config)
    for i in range(12):
        driven.add(generation(str(i), [i] * (10 * i + 1), max_tokens=5))
    while driven.engine.has_work():
        assert driven.step().prefilled_tokens <= 32
        assert driven.engine.stats().running <= 3
