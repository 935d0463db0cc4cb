"""QueueRoom: counts, and when a refused client should come back. That every request's elements
leave the books once, on every way to end, is in test_async_engine.py, with a real engine."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from model.inference.engine.events import FinishEvent, FinishReason, SequenceTimes
from model.inference.engine.requests import GenerationRequest, OutputsRequest
from model.inference.sampling.params import SamplingParams
from service.engine.admission import QueueFull, QueueLimits, QueueRoom, sequence_count
from tests.model.factories import tiny_config

CONFIG = tiny_config()
GENERATION = GenerationRequest(
    request_id="a", token_ids=(1, 2, 3), params=SamplingParams(max_tokens=5, seed=0)
)
ROWS = OutputsRequest(request_id="a", token_ids=(1, 2, 3), positions=(0, 2))


class Clock:
    """Says what it is told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def finish(prompt_tokens: int) -> FinishEvent:
    times = SequenceTimes(arrived=0, admitted=None, prefilled=None, finished=1)
    return FinishEvent("a", 0, FinishReason.LENGTH, times, prompt_tokens, 0, 5)


def refusals_after(gaps: Sequence[float], *, sequences: int) -> int:
    """`retry_after` of a refusal when a queue's sequences have ended with such gaps."""
    clock = Clock()
    room = QueueRoom(CONFIG, 1, QueueLimits(sequences - 1, 10**6, 10**9), clock)
    for _ in range(sequences):
        room.enter(GENERATION)
    for gap in gaps:
        clock.now += gap
        room.end_sequence(finish(3))
        room.enter(GENERATION)
    with pytest.raises(QueueFull) as caught:
        room.check([GENERATION])
    return caught.value.retry_after


def test_a_sequence_counts_once_a_request_n_times() -> None:
    assert sequence_count(replace(GENERATION, n=3)) == 3
    assert sequence_count(ROWS) == 1


def test_what_entered_and_ended_leaves_nothing() -> None:
    room = QueueRoom(CONFIG, 2, QueueLimits(10, 100, 10**6))
    room.reserve([ROWS, ROWS])
    room.unreserve([ROWS])
    room.enter(ROWS)
    assert (room.sequences, room.elements) == (2, 4 * CONFIG.vocab_size)
    room.end_sequence(finish(3))
    room.end_request(room.elements_of([ROWS]))
    assert (room.sequences, room.elements, room.is_empty) == (1, 2 * CONFIG.vocab_size, False)
    room.unreserve([ROWS])
    assert (room.sequences, room.elements, room.is_empty) == (0, 0, True)


def test_the_tokens_of_what_runs_do_not_wait() -> None:
    room = QueueRoom(CONFIG, 1, QueueLimits(10, 7, 10**6))
    room.enter(GENERATION)
    room.enter(GENERATION)
    with pytest.raises(QueueFull, match="6 prompt tokens are waiting, the queue holds 7"):
        room.check([GENERATION])
    room.stepped(3)
    room.check([GENERATION])


def test_a_refusal_says_when_by_the_pace_of_those_before() -> None:
    """The nearer to what sequences take lately, the more of them have ended; never below a second,
    never above a minute."""
    assert refusals_after([], sequences=5) == 5, "a second each, before anything is known"
    slow, slower = (refusals_after([3.0] * n, sequences=5) for n in (5, 100))
    assert 5 < slow < slower == 15
    assert refusals_after([0.01] * 100, sequences=5) == 1
    assert refusals_after([40.0] * 100, sequences=5) == 60
