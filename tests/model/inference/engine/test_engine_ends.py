"""Engine: aborts, deadlines and stop tokens end a request in every state."""

import pytest

from logitd.model.inference.engine.events import FinishEvent, FinishReason
from logitd.model.transformer.gpt import GPT
from tests.model.inference.engine.harness import (
    Driven,
    FakeClock,
    check_integrity,
    counts,
    generation,
    outputs_request,
    run,
)


def busy(gpt: GPT, clock: FakeClock | None = None, deadline: float | None = None) -> Driven:
    """An engine with two slots and three requests: 'decode' is running, 'prefill' has one chunk
    left, and 'queued' waits for a slot."""
    driven = Driven(gpt, clock, slots=2, prefill_chunk=32)
    driven.add(generation("decode", [1], max_tokens=100, deadline=deadline))
    driven.step()
    driven.add(generation("prefill", [2] * 90, deadline=deadline))
    driven.add(generation("queued", [3], deadline=deadline))
    driven.step()
    assert counts(driven.engine) == (1, 2, 2, 2)
    return driven


@pytest.mark.parametrize("name", ["decode", "prefill", "queued"])
def test_abort_ends_a_request_at_once(gpt: GPT, name: str) -> None:
    driven = busy(gpt)
    driven.abort(name)
    end = driven.outcomes[name, 0].ended
    assert end.reason is FinishReason.ABORT
    assert end.completion_tokens == (2 if name == "decode" else 0)
    check_integrity(driven.engine)
    driven.step()  # ... and its slot is free in the next step
    queued = driven.outcomes.get(("queued", 0))
    assert (name == "prefill") == (queued is not None and bool(queued.tokens))
    driven.drain()
    others = {key[0]: outcome.ended.reason for key, outcome in driven.outcomes.items()}
    del others[name]
    assert set(others.values()) == {FinishReason.LENGTH}
    assert driven.engine.abort(name) == []  # a second abort has no effect


def test_deadline_ends_a_request_in_every_state(gpt: GPT) -> None:
    clock = FakeClock()
    driven = busy(gpt, clock, deadline=110.0)
    driven.add(generation("unhurried", [4], deadline=120.0))
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
    assert driven.outcomes["unhurried", 0].ended.reason is FinishReason.LENGTH


def test_deadline_ends_all_siblings_and_a_paused_reader(gpt: GPT) -> None:
    clock = FakeClock()
    driven = Driven(gpt, clock)
    driven.engine._scheduler.step_elements = 1
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


def test_stop_token_at_max_tokens_is_a_stop(gpt: GPT) -> None:
    text = run(gpt, generation("a", [1, 2], max_tokens=4))["a", 0].token_ids
    last = frozenset({text[-1]})
    first = text.index(text[-1])
    outcome = run(gpt, generation("a", [1, 2], max_tokens=first + 1, stop_token_ids=last))["a", 0]
    assert outcome.token_ids == text[: first + 1]
    assert outcome.ended.reason is FinishReason.STOP
