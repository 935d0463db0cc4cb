"""AdmissionController: what it counts, what it rejects, and when a rejected client may come back.
That the elements of each request are given back once, on every way to end, is in
test_accounting.py, with a real engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from model.inference.engine.events import FinishEvent, FinishReason, SequenceTimes
from model.inference.engine.requests import GenerationRequest, OutputsRequest
from model.inference.errors import InvalidRequest
from model.inference.sampling.params import SamplingParams
from service.engine.admission import AdmissionController, Load, QueueFull, QueueLimits
from tests.model.factories import tiny_config

CONFIG = tiny_config()
GENERATION = GenerationRequest(
    request_id="a", token_ids=(1, 2, 3), params=SamplingParams(max_tokens=5, seed=0)
)
ROWS = OutputsRequest(request_id="a", token_ids=(1, 2, 3), positions=(0, 2))
ROWS_LOAD = Load(sequences=1, tokens=3, elements=2 * CONFIG.vocab_size)


class Clock:
    """Says what it is told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def controller(
    slots: int,
    sequences: int,
    tokens: int = 10**6,
    elements: int = 10**9,
    per_request: int = 64,
    clock: Clock | None = None,
) -> AdmissionController:
    limits = QueueLimits(sequences, tokens, elements, per_request)
    return AdmissionController(CONFIG, slots, limits, clock or Clock())


def finish(prompt_tokens: int) -> FinishEvent:
    times = SequenceTimes(arrived=0, admitted=None, prefilled=None, finished=1)
    return FinishEvent("a", 0, FinishReason.LENGTH, times, prompt_tokens, 0, 5)


def retry_after(gaps: Sequence[float], *, sequences: int) -> int:
    """What a full queue answers when its sequences have ended with such gaps."""
    clock = Clock()
    admission = controller(1, sequences - 1, clock=clock)
    for _ in range(sequences):
        admission.admit([GENERATION])
    for gap in gaps:
        clock.now += gap
        admission.end_sequence(finish(3))
        admission.admit([GENERATION])
    with pytest.raises(QueueFull) as caught:
        admission.admit([GENERATION])
    return caught.value.retry_after


def test_a_sequence_counts_once_a_request_n_times() -> None:
    admission = controller(1, 10)
    assert admission.load_of(replace(GENERATION, n=3)) == Load(sequences=3, tokens=9)
    assert admission.load_of(ROWS) == ROWS_LOAD


def test_what_was_admitted_and_ended_leaves_nothing() -> None:
    admission = controller(2, 10, 100, 10**6)
    admission.reserve([ROWS, ROWS])
    assert admission.admit_reserved(ROWS) == ROWS_LOAD
    assert (admission.sequences, admission.elements) == (2, 4 * CONFIG.vocab_size)
    admission.end_sequence(finish(3))
    admission.end_request(ROWS_LOAD)
    assert (admission.sequences, admission.elements) == (1, 2 * CONFIG.vocab_size)
    assert not admission.is_empty
    admission.release([ROWS])
    assert (admission.sequences, admission.elements) == (0, 0)
    assert admission.is_empty


def test_all_requests_are_admitted_or_none() -> None:
    admission = controller(1, 2)
    assert admission.admit([ROWS, GENERATION]) == [ROWS_LOAD, Load(sequences=1, tokens=3)]
    with pytest.raises(QueueFull, match="1 sequences are waiting, the queue holds 2"):
        admission.admit([ROWS, ROWS])
    assert admission.sequences == 2


def test_the_tokens_of_what_runs_do_not_wait() -> None:
    admission = controller(1, 10, 7)
    admission.admit([GENERATION])
    admission.admit([GENERATION])
    with pytest.raises(QueueFull, match="6 prompt tokens are waiting, the queue holds 7"):
        admission.admit([GENERATION])
    admission.set_begun(3)
    admission.admit([GENERATION])


def test_what_is_held_counts_while_its_texts_are_encoded() -> None:
    """The room is there when the requests are submitted right after the block, and for nobody
    else meanwhile."""
    admission = controller(1, 1)
    with admission.hold(2, "n"):
        assert (admission.sequences, admission.is_empty) == (2, False)
        with pytest.raises(QueueFull, match="1 sequences are waiting"):
            admission.check_capacity(Load(sequences=1))
    admission.admit([replace(GENERATION, n=2)])
    with pytest.raises(QueueFull), admission.hold(1, "prompt"):
        pass
    assert admission.sequences == 2


def test_what_is_held_is_given_back_after_an_error() -> None:
    admission = controller(1, 1)
    with pytest.raises(ZeroDivisionError), admission.hold(2, "n"):
        raise ZeroDivisionError
    assert admission.is_empty


@pytest.mark.parametrize(
    ("slots", "queue", "message"),
    [
        (100, 100, "the request has 9 sequences (prompts times n); 8 are allowed in one. "
                   "Send fewer, or raise --max-sequences"),
        (2, 3, "the request has 6 sequences (prompts times n); 2 slots and a queue of 3 never "
               "have room for so many. Send fewer, or raise --max-queue"),
    ],
)  # fmt: skip
def test_what_never_fits_is_an_invalid_request(slots: int, queue: int, message: str) -> None:
    """However empty the queue is: to try again would be in vain."""
    admission = controller(slots, queue, per_request=8)
    sequences = 9 if queue == 100 else 6
    with pytest.raises(InvalidRequest) as caught, admission.hold(sequences, "n"):
        pass
    assert (str(caught.value), caught.value.param) == (message, "n")


def test_more_elements_than_the_queue_ever_holds() -> None:
    admission = controller(1, 10, elements=2 * CONFIG.vocab_size)
    admission.check_capacity(admission.load_of(ROWS))
    with pytest.raises(InvalidRequest, match=r"asks for .* output elements .* never holds more"):
        admission.admit([ROWS, ROWS])


def test_waiting_until_it_is_empty() -> None:
    async def test() -> None:
        admission = controller(1, 10)
        await admission.wait_empty()
        admission.admit([])
        await admission.wait_empty()
        with admission.hold(1, "prompt"):
            waiting = asyncio.create_task(admission.wait_empty())
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
        admission.admit([GENERATION])
        waiting = asyncio.create_task(admission.wait_empty())
        await asyncio.sleep(0)
        assert not waiting.done()
        admission.clear()
        await waiting

    asyncio.run(test())


def test_a_full_queue_says_when_by_the_pace_of_those_before() -> None:
    """The nearer to what sequences take lately, the more of them have ended; never below a second,
    never above a minute."""
    assert retry_after([], sequences=5) == 5, "a second each, before anything is known"
    slow, slower = (retry_after([3.0] * n, sequences=5) for n in (5, 100))
    assert 5 < slow < slower == 15
    assert retry_after([0.01] * 100, sequences=5) == 1
    assert retry_after([40.0] * 100, sequences=5) == 60
