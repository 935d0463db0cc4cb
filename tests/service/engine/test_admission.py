"""AdmissionController: its counts, its rejections, and the delay that it advises before a retry.
test_accounting.py uses a real engine to test that each request's elements are released once.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.inference.engine.cost import prices
from logitd.model.inference.engine.events import FinishEvent, FinishReason, SequenceTimes
from logitd.model.inference.engine.requests import GenerationRequest, OutputsRequest
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.sampling.params import SamplingParams
from logitd.service.engine.admission import AdmissionController, Load, QueueFull, QueueLimits
from tests.model.factories import tiny_config

CONFIG = tiny_config()
GENERATION = GenerationRequest(
    request_id="a", token_ids=(1, 2, 3), params=SamplingParams(max_tokens=5, seed=0)
)
ROWS = OutputsRequest(request_id="a", token_ids=(1, 2, 3), positions=(0, 2))


class Clock:
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
    most_tokens: int = 10**6,
) -> AdmissionController:
    limits = QueueLimits(sequences, tokens, elements, per_request, most_tokens)
    return AdmissionController(CONFIG, slots, limits, clock or Clock())


def finish(prompt_tokens: int) -> FinishEvent:
    times = SequenceTimes(arrived=0, admitted=None, prefilled=None, finished=1)
    return FinishEvent("a", 0, FinishReason.LENGTH, times, prompt_tokens, 0, 5)


def retry_after(gaps: Sequence[float], *, sequences: int) -> int:
    """The delay in seconds that a full queue suggests, if its earlier sequences ended at these
    intervals, also in seconds."""
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


def test_admit_takes_all_requests_or_none() -> None:
    admission = controller(1, 2)
    admission.admit([ROWS, GENERATION])
    with pytest.raises(QueueFull, match="1 sequence waiting, limit 2"):
        admission.admit([ROWS, ROWS])
    assert admission.sequences == 2


def test_held_sequences_count_while_texts_are_encoded() -> None:
    """Held sequences count in the queue until the block ends, and no longer."""
    admission = controller(1, 1)
    with admission.hold(2, "n"):
        assert admission.sequences == 2
        with pytest.raises(QueueFull, match="1 sequence waiting"):
            admission.check_capacity(Load(sequences=1))
    admission.admit([replace(GENERATION, n=2)])
    with pytest.raises(QueueFull), admission.hold(1, "prompt"):
        pass
    assert admission.sequences == 2


def test_held_sequences_are_released_after_an_error() -> None:
    admission = controller(1, 1)
    with pytest.raises(ZeroDivisionError), admission.hold(2, "n"):
        raise ZeroDivisionError
    assert not admission.sequences


@pytest.mark.parametrize(
    ("slots", "queue", "sequences", "message"),
    [
        (100, 100, 9, r"9 .*the limit of one request is 8.*--max-sequences"),
        (2, 3, 6, r"6 .* 2 .* 3 .*--max-queue"),
    ],
)
def test_request_that_never_fits_is_invalid(
    slots: int, queue: int, sequences: int, message: str
) -> None:
    """QueueFull would tell the client to retry."""
    admission = controller(slots, queue, per_request=8)
    with pytest.raises(InvalidRequest, match=message) as caught, admission.hold(sequences, "n"):
        pass
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    "request_",
    [
        replace(GENERATION, token_ids=(1,) * 40, n=5),
        replace(GENERATION, interventions=(Intervention(stage="embedding", operation="zero"),) * 3),
    ],
)
def test_admission_refuses_what_costs_too_many_tokens(request_: GenerationRequest) -> None:
    tokens = sum(prices(request_, CONFIG))
    admission = controller(1, 10, most_tokens=tokens - 1)
    with pytest.raises(InvalidRequest, match=rf"{tokens} .*{tokens - 1}.*--max-request-tokens"):
        admission.admit([request_])
    assert not admission.sequences
    controller(1, 10, most_tokens=tokens).admit([request_])


async def test_wait_empty_waits_for_the_last_sequence() -> None:
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


def test_retry_after_follows_the_pace() -> None:
    """The estimate approaches the recent pace, but is at least a second and at most a minute."""
    assert retry_after([], sequences=5) == 5, "a second each by default"
    slow, slower = (retry_after([3.0] * n, sequences=5) for n in (5, 100))
    assert 5 < slow < slower == 15
    assert retry_after([0.01] * 100, sequences=5) == 1
    assert retry_after([40.0] * 100, sequences=5) == 60


# Several callers


def sent_by(caller: str, n: int = 1) -> GenerationRequest:
    return replace(GENERATION, n=n, caller=caller)


def test_shares_apply_to_tokens_and_elements() -> None:
    rows = CONFIG.vocab_size * 2
    admission = controller(1, 100, tokens=12, elements=2 * rows)
    for _ in range(4):
        admission.admit([sent_by("a")])
    with pytest.raises(QueueFull, match="12 prompt tokens waiting"):
        admission.admit([sent_by("a")])
    admission.admit([sent_by("b"), sent_by("b")])
    with pytest.raises(QueueFull, match="18 prompt tokens waiting"):
        admission.admit([sent_by("b")])
    admission = controller(1, 100, elements=2 * rows)
    admission.admit([replace(ROWS, caller="a")] * 2)
    with pytest.raises(QueueFull, match="output elements"):
        admission.admit([replace(ROWS, caller="a")])
    admission.reserve([replace(ROWS, caller="b")])
    with pytest.raises(QueueFull, match="output elements"):
        admission.reserve([replace(ROWS, caller="b")])


def test_request_above_the_limit_of_tokens_shuts_nobody_out() -> None:
    """64 circuits in one request cost more than twice the limit of tokens. Such a request once made
    everybody else get 429 for as long as it ran."""
    admission = controller(1, 100, tokens=12)
    large = replace(GENERATION, token_ids=(1,) * 30, caller="a")
    admission.admit([large, large])
    admission.admit([sent_by("b"), sent_by("b")])
    with pytest.raises(QueueFull, match="66 prompt tokens waiting"):
        admission.admit([sent_by("b")])
    with pytest.raises(QueueFull):
        admission.admit([sent_by("a")])


def test_queue_of_zero_admits_no_waiting_sequence() -> None:
    admission = controller(1, 0)
    admission.admit([sent_by("a")])
    with pytest.raises(QueueFull):
        admission.admit([sent_by("b")])


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 4), st.booleans()), max_size=80),
    st.integers(0, 12),
)
def test_every_caller_gets_its_share(acts: list[tuple[str, int, bool]], limit: int) -> None:
    """No caller is rejected while there is room. A caller below its share is not rejected either,
    as long as all callers together have less than twice the limit. Requests that have ended are not
    counted."""
    slots = 2
    admission = controller(slots, limit)
    open_: Counter[str] = Counter()
    for caller, n, ends in acts:
        if ends and open_[caller]:
            admission.end_sequence(finish(3), caller)
            open_[caller] -= 1
            continue
        total = open_.total() + n
        try:
            admission.admit([sent_by(caller, n)])
        except InvalidRequest:
            assert n > slots + limit
        except QueueFull:
            present = sum(1 for other in open_ if other == caller or open_[other])
            present += caller not in open_
            below = open_[caller] + n <= limit // present
            assert total > slots + limit
            assert not below or total > slots + 2 * limit
        else:
            open_[caller] += n
        assert admission.sequences == open_.total() <= slots + 2 * limit
    for caller in open_.elements():
        admission.end_sequence(finish(3), caller)
    assert not admission.sequences
    assert not admission._open.by_caller
