"""Overlapping the steps changes when they are computed, but none of their events. Engines whose
decoder launches steps ahead, on a device that does everything as late as possible, are compared
with engines whose decoder does not. Both execute the same commands, and each step must have the
same events, counts, times and remaining work."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitd.model.inference.engine.events import FinishReason, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.reference import generate
from tests.model.inference.engine.harness import (
    Driven,
    JumpingClock,
    Steps,
    assert_is_reference,
    generation,
    params,
    random_prompt,
    run,
)
from tests.model.inference.engine.played import (
    OLD,
    VOCABULARY,
    Ask,
    Command,
    Launching,
    Played,
    ask_in_turn,
    asks,
    launching,
    plays,
    prompts,
    steps,
)
from tests.model.inference.engine.test_engine_failures import failing_gpt
from tests.model.inference.kernels.graphs import graph_decoder
from tests.profiles import examples


@settings(max_examples=examples(150))
@given(commands=plays, slots=st.integers(1, 4))
def test_overlapped_steps_have_the_events_of_sequential_ones(
    commands: list[Ask | Command], slots: int
) -> None:
    """Requests of every kind are played, with aborts, deadlines and new weights at any time. The
    engine is batch-invariant, so the leftover row of a sequence that ended during a step in flight
    must not change a bit."""
    overlapped = Played(slots=slots).play(commands)
    assert overlapped == Played(slots=slots, overlap=False).play(commands)


@settings(max_examples=examples(75))
@given(
    commands=st.lists(st.one_of(asks, steps, steps), min_size=2, max_size=15),
    most_steps=st.sampled_from([1, 2, 8]),
)
def test_overlapped_tokens_match_the_reference(
    commands: list[Ask | Command], most_steps: int
) -> None:
    """Steps have different sizes, and launches contain different numbers of steps."""
    played = Played(batch_invariant=False, most_steps=most_steps)
    played.play(commands)
    for request in played.asked:
        if isinstance(request, GenerationRequest):
            for index in range(request.n):
                outcome = played.driven.outcomes[request.request_id, index]
                assert outcome.ended.reason is not FinishReason.ERROR
                if outcome.ended.reason is not FinishReason.TIMEOUT:
                    assert_is_reference(
                        OLD, request.token_ids, request.params, index, outcome.token_ids
                    )


failures = given(
    prompts=st.lists(prompts, min_size=1, max_size=5),
    waits=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    fails_at=st.sets(st.integers(1, 30), min_size=1, max_size=3),
)


@settings(max_examples=examples(75))
@failures
def test_failing_decoder_fails_the_same_step(
    prompts: list[list[int]], waits: list[int], fails_at: set[int]
) -> None:
    """An error in a launch is raised when the launch's tokens are due, after the tokens of the
    previous step. Every sequence ends at its maximum length, so both engines run the same forward
    passes."""
    said = []
    for overlap in (True, False):
        make = partial(graph_decoder, batch_invariant=True, overlap=overlap, most_steps=1)
        played = Played(failing_gpt(OLD, *fails_at), make)
        said.append(ask_in_turn(played, prompts, waits))
    assert said[0] == said[1]


@settings(max_examples=examples(75))
@failures
def test_failing_device_fails_only_the_step_it_computes(
    prompts: list[list[int]], waits: list[int], fails_at: set[int]
) -> None:
    """A step fails while the next one is in flight. Each sequence of the failed step gets one
    error."""
    played = Played(failing_gpt(OLD, *fails_at))
    ask_in_turn(played, prompts, waits)
    for number, prompt in enumerate(prompts):
        outcome = played.driven.outcomes[str(number), 0]
        if outcome.ended.reason is FinishReason.ERROR:
            assert "RuntimeError: no memory" in (outcome.ended.error or "")
        else:
            sampling = params(3 + 2 * number)
            assert_is_reference(OLD, prompt, sampling, 0, outcome.token_ids)


def test_later_steps_are_launched_before_they_are_due() -> None:
    """The engine delivers the events of a step before it waits for the next one."""
    driven = Played().driven
    device = launching(driven).late
    driven.add(generation("a", [1, 2, 3], max_tokens=10))
    driven.add(generation("b", [4, 5], max_tokens=7, temperature=1.0))
    driven.step()  # the prompts, and first tokens
    for decoded in range(1, 9):
        result = driven.step()
        assert result.decoded_sequences == (2 if decoded <= 6 else 1)
        assert not device.idle(), "the next step has been launched, and nothing waited for it"
    driven.step()
    assert device.idle(), "no step follows the last token"
    assert not driven.engine.has_work()
    decoder = launching(driven)
    assert (decoder.decoded, decoder.launched, decoder.launched_next) == (0, 1, 8)


def test_launch_of_several_steps_yields_their_tokens_together() -> None:
    """A launch has no more steps than the longest sequence needs, and the extra tokens of the
    shorter sequence are dropped. The sequence named "end" fills its slot to the last position."""
    length = OLD.config.context_length
    asked = {"end": (random_prompt(random.Random(3), length - 5), 5), "long": ([4, 5], 17)}
    driven = Played(most_steps=8, batch_invariant=False).driven
    for name, (prompt, count) in asked.items():
        driven.add(generation(name, prompt, max_tokens=count))
    while driven.step().decoded_sequences < 2:
        pass
    counts = [len(outcome.token_ids) for outcome in driven.outcomes.values()]
    assert counts == [5, 1 + 8]
    outcomes = driven.drain()
    for name, (prompt, count) in asked.items():
        assert outcomes[name, 0].token_ids == generate(OLD, prompt, params(count))
    assert (launching(driven).launched, launching(driven).launched_next) == (1, 1)


def test_changed_rows_do_not_wait_for_the_step_in_flight() -> None:
    """The step of the other sequences was launched ahead, without the changed rows."""
    zero = Intervention(stage="blocks.0.attention.v", operation="zero")
    plain = generation("plain", [1, 2, 3], max_tokens=60)
    changed = replace(generation("changed", [4, 5], max_tokens=5), interventions=(zero,))
    driven = Driven(
        OLD, JumpingClock(random.Random(0)), make_decoder=partial(Launching, batch_invariant=True)
    )
    driven.add(plain, changed)
    together = driven.drain()
    assert launching(driven).launched_next > 0
    for request in (plain, changed):
        alone = run(OLD, request)[request.request_id, 0]
        assert together[request.request_id, 0].token_ids == alone.token_ids


def test_new_prompt_does_not_wait_for_the_step_in_flight() -> None:
    driven = Played().driven
    decoder = launching(driven)
    driven.add(generation("early", [1, 2, 3], max_tokens=30))
    for _ in range(5):
        driven.step()
    forwards = (decoder.launched, decoder.launched_next)
    driven.add(generation("late", [4, 5, 6], max_tokens=5))
    events = driven.step().events
    assert [event.request_id for event in events if isinstance(event, TokenEvent)] == [
        "late",
        "early",
    ]
    assert (decoder.launched, decoder.launched_next) == forwards, "nothing is computed again"
    for _ in range(3):
        assert driven.step().decoded_sequences == 2
    assert (decoder.launched, decoder.launched_next) == (forwards[0] + 1, forwards[1] + 3)
    assert decoder.decoded == 0


@pytest.mark.parametrize("ends_by", ["abort", "stop", "deadline"])
def test_next_sequence_of_a_slot_sees_no_step_in_flight(ends_by: str) -> None:
    """The keys and values of the token in flight are not finite, and lie far beyond the end of the
    next prompt. They must be erased, not only masked, before the slot's next sequence reaches that
    position."""
    prompt = random_prompt(random.Random(11), 50)
    text = generate(OLD, prompt, params(4))
    assert len(set(text)) == 4
    stop = frozenset(text[3:] if ends_by == "stop" else [])
    played = Played(slots=2, batch_invariant=False)
    driven, cache = played.driven, played.driven.engine._runner.cache
    deadline = played.clock.now + 1 if ends_by == "deadline" else None
    driven.add(generation("beside", [1], max_tokens=40))
    driven.add(generation("ends", prompt, max_tokens=20, stop_token_ids=stop, deadline=deadline))
    for _ in range(5):  # two for the prompt
        driven.step()
    if ends_by == "abort":
        driven.abort("ends")
    played.clock.now += 2
    launching(driven).late.finish()
    assert isinstance(cache, KVCache)
    cache.keys[:, 1, :, 53:54] = cache.values[:, 1, :, 53:54] = torch.nan
    driven.add(generation("next", [5, 6], max_tokens=40))
    outcomes = driven.drain()
    assert outcomes["ends", 0].token_ids == text[: len(outcomes["ends", 0].token_ids)]
    for name, prompt in (("beside", [1]), ("next", [5, 6])):
        assert outcomes[name, 0].token_ids == generate(OLD, prompt, params(40))


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 2},
        {"constraint": Steps(VOCABULARY)},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_step_with_processed_rows_is_not_overlapped(sampling: dict[str, Any]) -> None:
    driven = Played().driven
    driven.add(generation("plain", [1, 2], max_tokens=12))
    driven.add(generation("asks", [3, 4], max_tokens=5, **sampling))
    driven.step()
    for _ in range(4):
        driven.step()
        assert launching(driven).late.idle()
    decoder = launching(driven)
    assert (decoder.launched, decoder.decoded) == (0, 4)
    driven.step()  # only the plain one
    assert not decoder.late.idle()


def test_drafts_and_overlap_exclude_each_other() -> None:
    make = partial(Launching, batch_invariant=True)
    driven = Driven(OLD, make_decoder=make, speculate="ngram")
    driven.add(generation("a", [1, 2, 3], max_tokens=9))
    outcomes = driven.drain()
    assert launching(driven).launched == 0
    assert outcomes["a", 0].token_ids == generate(OLD, [1, 2, 3], params(9))
