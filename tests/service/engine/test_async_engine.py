"""AsyncEngine: the engine behind an event loop, without HTTP. Real engines, small models; one that
breaks on purpose, and one that waits for permission to step.
"""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.inference.engine.config import EngineConfig
from model.inference.engine.cost import output_elements
from model.inference.engine.engine import Engine
from model.inference.engine.events import (
    Event,
    FinishEvent,
    FinishReason,
    OutputsChunk,
    StepResult,
    TokenEvent,
)
from model.inference.engine.requests import (
    GenerationRequest,
    OutputsRequest,
    Request,
    ScoreRequest,
    sequence_lengths,
)
from model.inference.errors import InvalidRequest
from model.inference.reference import generate
from model.inference.sampling.params import SamplingParams
from service.engine.admission import AdmissionController, Load, QueueFull, QueueLimits
from service.engine.async_engine import AsyncEngine, Reservation
from service.engine.driver import LocalDriver, StepReport
from service.engine.submission import EngineStopped, Submission
from tests.model.factories import tiny_gpt
from tests.service.serving import PATIENCE
from tests.service.spelling import long_prompt, spelled, spelling_gpt

TINY = tiny_gpt()
SPELLING = spelling_gpt()
LIMITS = QueueLimits(sequences=10, tokens=1000, elements=10**6, per_request=64)


class GatedEngine(Engine):
    """Steps when it is allowed to; so that a test knows what has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()
        self.gate.set()
        self.steps = 0

    def step(self) -> StepResult:
        assert self.gate.wait(PATIENCE)
        self.steps += 1
        return super().step()


class PermittedEngine(Engine):
    """Steps as often as it is permitted to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.permits = threading.Semaphore(0)

    def step(self) -> StepResult:
        assert self.permits.acquire(timeout=PATIENCE)
        return super().step()


class BrokenEngine(Engine):
    """Its scheduler has a bug that shows at the fourth step."""

    steps = 0

    def step(self) -> StepResult:
        self.steps += 1
        if self.steps == 4:
            raise ZeroDivisionError("a secret of the engine")
        return super().step()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE))


@asynccontextmanager
async def running(
    engine: Engine,
    max_queue: int = 100,
    max_queue_tokens: int = 10_000,
    max_queue_elements: int = 10**7,
    stall_timeout: float = PATIENCE,
    drain_timeout: float = PATIENCE,
) -> AsyncIterator[tuple[AsyncEngine, list[StepReport]]]:
    reports: list[StepReport] = []
    limits = QueueLimits(
        sequences=max_queue, tokens=max_queue_tokens, elements=max_queue_elements, per_request=64
    )
    owner = AsyncEngine(
        LocalDriver(engine),
        AdmissionController(engine.model_config, engine.slots, limits),
        stall_timeout=stall_timeout,
        on_step=reports.append,
    )
    try:
        yield owner, reports
    finally:
        await owner.stop(drain_timeout)
        engine.check_integrity()


def tiny(slots: int = 4) -> GatedEngine:
    return GatedEngine(TINY, EngineConfig(slots=slots))


def generation(
    name: str, tokens: int = 5, *, n: int = 1, seed: int = 0, deadline: float | None = None
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        token_ids=tuple(name.encode()),
        params=SamplingParams(max_tokens=tokens, seed=seed),
        n=n,
        deadline=deadline,
    )


def all_rows(name: str, length: int) -> OutputsRequest:
    return OutputsRequest(
        request_id=name, token_ids=tuple(long_prompt(length)), positions=tuple(range(length))
    )


def scores(name: str, *lengths: int) -> ScoreRequest:
    """Continuations of these lengths after a prompt of ten tokens."""
    return ScoreRequest(
        request_id=name,
        token_ids=tuple(long_prompt(10)),
        continuations=tuple(tuple(long_prompt(length)) for length in lengths),
    )


def prompt_logprobs(name: str, length: int, n: int = 1) -> GenerationRequest:
    prompt = tuple(long_prompt(length))
    return replace(generation(name, 2, n=n), token_ids=prompt, prompt_logprobs=0)


async def rest(submission: Submission) -> list[Event]:
    events: list[Event] = []
    while not submission.finished:
        events += await submission.take()
    return events


def token_ids(events: list[Event], name: str, index: int = 0) -> list[int]:
    return [
        event.token_id
        for event in events
        if isinstance(event, TokenEvent) and (event.request_id, event.index) == (name, index)
    ]


def finishes(events: list[Event]) -> list[FinishEvent]:
    return [event for event in events if isinstance(event, FinishEvent)]


# Requests and their events


def test_every_request_gets_its_own_events_and_one_end() -> None:
    async def test() -> None:
        async with running(tiny(slots=2)) as (owner, _):
            requests: list[Request] = [
                generation(f"request {i}", tokens=i + 1, n=1 + i % 2, seed=i) for i in range(8)
            ]
            submissions = [owner.submit([request]) for request in requests]
            assert owner.open_sequences == 12
            for request, submission in zip(requests, submissions, strict=True):
                assert isinstance(request, GenerationRequest)
                events = await rest(submission)
                assert {event.request_id for event in events} == {request.request_id}
                assert len(finishes(events)) == request.n
                assert isinstance(events[-1], FinishEvent)
                for index in range(request.n):
                    assert token_ids(events, request.request_id, index) == generate(
                        TINY, request.token_ids, request.params, index
                    )
            assert owner.open_sequences == 0

    run(test)


def test_one_submission_of_many_requests_is_one_mailbox() -> None:
    async def test() -> None:
        async with running(tiny()) as (owner, _):
            submission = owner.submit([generation("one"), generation("two", n=2)])
            assert submission.request_ids == ("one", "two")
            events = await rest(submission)
            assert [len(token_ids(events, "one")), len(token_ids(events, "two", 1))] == [5, 5]
            assert len(finishes(events)) == 3
            assert submission.finished

    run(test)


def test_one_delivery_per_step_however_many_sequences() -> None:
    async def test() -> None:
        engine = tiny(slots=4)
        async with running(engine) as (owner, reports):
            engine.gate.clear()
            submission = owner.submit([generation("a", 10, n=4)])
            engine.gate.set()
            await rest(submission)
        assert len(reports) == engine.steps
        tokens = [sum(isinstance(e, TokenEvent) for e in report.events) for report in reports]
        assert sum(tokens) == 40
        assert max(tokens) == 4, "tokens of one step come together"
        assert engine.steps < 20

    run(test)


def test_a_slow_taker_gets_fewer_larger_pieces() -> None:
    async def test() -> None:
        async with running(tiny()) as (owner, reports):
            submission = owner.submit([generation("a", 20)])
            while owner.open_sequences:
                await asyncio.sleep(0)
            events = await submission.take()
            assert len(token_ids(events, "a")) == 20
            assert submission.finished
            assert len(reports) >= 20

    run(test)


def test_tokens_wait_for_each_other_while_the_loop_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a prompt do not, and bring along what has waited; nor does the last of all."""
    monkeypatch.setattr("service.engine.wakeup.PAUSE_FACTOR", 1e9)
    monkeypatch.setattr("service.engine.wakeup.MAX_PAUSE", PATIENCE)

    async def test() -> None:
        engine = PermittedEngine(TINY, EngineConfig(slots=4))
        async with running(engine) as (owner, reports):
            first = owner.submit([generation("a", 10)])
            engine.permits.release()
            assert len(token_ids(await first.take(), "a")) == 1
            engine.permits.release(3)
            assert await first.take(timeout=0.1) == []
            second = owner.submit([generation("b", 10)])
            engine.permits.release(2)  # one may have begun without it
            assert len(token_ids(await second.take(), "b")) == 1
            before = token_ids(await first.take(), "a")
            assert len(before) >= 4
            engine.permits.release(20)
            assert len(token_ids(await rest(first), "a")) == 9 - len(before)
            assert len(token_ids(await rest(second), "b")) == 9
            assert len(reports) >= 11, "each step is reported all the same"

    run(test)


def test_what_was_left_behind_comes_when_the_pause_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the thread is in a step that does not end."""
    monkeypatch.setattr("service.engine.wakeup.PAUSE_FACTOR", 1e9)

    async def test() -> None:
        engine = PermittedEngine(TINY, EngineConfig(slots=4))
        async with running(engine) as (owner, _):
            submission = owner.submit([generation("a", 8)])
            engine.permits.release()
            assert len(token_ids(await submission.take(), "a")) == 1
            for _ in range(3):
                engine.permits.release(2)
                events: list[Event] = []
                while len(events) < 2:
                    events += await submission.take()
                assert len(token_ids(events, "a")) == 2
            engine.permits.release(20)
            await rest(submission)

    run(test)


def test_take_gives_up_after_its_timeout_and_loses_nothing() -> None:
    async def test() -> None:
        engine = tiny()
        async with running(engine) as (owner, _):
            engine.gate.clear()
            submission = owner.submit([generation("a", 2)])
            assert await submission.take(timeout=0.01) == []
            assert not submission.finished
            engine.gate.set()
            assert len(token_ids(await rest(submission), "a")) == 2

    run(test)


def test_a_taker_that_is_cancelled_is_cancelled() -> None:
    """Also when an event comes in the same moment; else a client that has left would keep its
    request going."""

    async def test() -> None:
        engine = tiny()
        async with running(engine) as (owner, reports):
            engine.gate.clear()
            submission = owner.submit([generation("a", 100)])
            taking = asyncio.ensure_future(submission.take(timeout=PATIENCE))
            await asyncio.sleep(0)
            engine.gate.set()
            while not reports:  # the delivery and the cancellation meet in one turn of the loop
                await asyncio.sleep(0)
            taking.cancel()
            await asyncio.wait({taking})
            assert taking.cancelled()
            await rest(submission)

    run(test)


# What is refused


def test_what_the_model_cannot_compute_is_refused_before_it_is_queued() -> None:
    async def test() -> None:
        async with running(tiny()) as (owner, _):
            for request in (generation("x" * 100, 29), generation(""), all_rows("a", 129)):
                with pytest.raises(InvalidRequest):
                    owner.submit([generation("good"), request])
                with pytest.raises(InvalidRequest):
                    owner.reserve([request])
            assert owner.open_sequences == 0, "all or none"

    run(test)


def test_a_full_queue_refuses_all_or_nothing_and_says_when() -> None:
    async def test() -> None:
        engine = tiny(slots=2)
        async with running(engine, max_queue=3) as (owner, _):
            engine.gate.clear()
            accepted = [owner.submit([generation("a", n=2)]), owner.submit([generation("b", n=2)])]
            for refused in ([generation("c", n=2)], [generation("c"), generation("d")]):
                with pytest.raises(QueueFull, match=r"^2 sequences .* queue holds 3$") as caught:
                    owner.submit(refused)
                assert 1 <= caught.value.retry_after <= 60
            assert owner.open_sequences == 4
            accepted.append(owner.submit([generation("e")]))
            engine.gate.set()
            for submission in accepted:
                ends = [event.reason for event in finishes(await rest(submission))]
                assert set(ends) == {FinishReason.LENGTH}
            await rest(owner.submit([generation("c", n=2)]))

    run(test)


def test_the_queue_is_bounded_by_prompt_tokens_too() -> None:
    """Few long prompts fill it as many short ones do; but an empty queue takes any prompt that
    fits the model, or it would never be computed."""

    async def test() -> None:
        engine = tiny(slots=1)
        async with running(engine, max_queue=50, max_queue_tokens=60) as (owner, _):
            engine.gate.clear()
            accepted = [owner.submit([generation("r" * 100)])]
            accepted.append(owner.submit([generation("l" * 90)]))
            with pytest.raises(QueueFull, match=r"prompt tokens are waiting, the queue holds 60$"):
                owner.submit([generation("one more")])
            engine.gate.set()
            for submission in accepted:
                await rest(submission)
            await rest(owner.submit([generation("one more")]))

    run(test)


def test_the_queue_is_bounded_by_the_numbers_of_rows_too() -> None:
    """Of those that run as well: they may all be still to come. What asks for none is not refused
    for the sake of others' rows."""

    async def test() -> None:
        engine = tiny(slots=4)
        async with running(engine, max_queue_elements=20 * 257) as (owner, _):
            engine.gate.clear()
            accepted = [owner.submit([all_rows("a", 9)]), owner.submit([scores("b", 4, 5)])]
            assert owner.open_elements == 18 * 257
            refusals: list[tuple[int, list[Request]]] = [
                (3, [all_rows("c", 3)]),
                (3, [scores("c", 1, 2)]),
                (9, [scores("c")]),
                (3, [prompt_logprobs("c", 4)]),
                (3, [all_rows("c", 1), all_rows("d", 2)]),
            ]
            for rows, refused in refusals:
                with pytest.raises(QueueFull) as caught:
                    owner.submit(refused)
                assert str(caught.value) == (
                    f"{18 * 257} output elements are waiting or being computed and the request "
                    f"asks for {rows * 257}, the queue holds {20 * 257}"
                )
                assert 1 <= caught.value.retry_after <= 60
                with pytest.raises(QueueFull):
                    owner.reserve(refused)
            accepted.append(owner.submit([generation("e", n=3)]))
            accepted.append(owner.submit([all_rows("f", 2)]))
            assert owner.open_elements == 20 * 257, "just full"
            accepted.append(owner.submit([generation("g")]))
            engine.gate.set()
            for submission in accepted:
                await rest(submission)
            assert owner.open_elements == 0
            await rest(owner.submit([all_rows("h", 20)]))

    run(test)


@pytest.mark.parametrize(
    "requests",
    [[all_rows("a", 21)], [all_rows("a", 9), all_rows("b", 12)], [scores("a", 10, 11)],
     [prompt_logprobs("a", 22)]],
    ids=["rows", "rows of two prompts", "scores", "logprobs of a prompt"],
)  # fmt: skip
def test_more_numbers_than_the_queue_ever_holds_are_refused_for_good(
    requests: list[Request],
) -> None:
    async def test() -> None:
        async with running(tiny(), max_queue_elements=20 * 257) as (owner, _):
            for ask in (owner.submit, owner.reserve):
                with pytest.raises(InvalidRequest) as caught:
                    ask(requests)
                assert f"asks for {21 * 257} output elements" in str(caught.value)
                assert f"never holds more than {20 * 257}. Ask for fewer" in str(caught.value)
            assert (owner.open_elements, owner.open_sequences) == (0, 0)

    run(test)


def test_a_step_that_hangs_is_seen() -> None:
    async def test() -> None:
        engine = tiny()
        async with running(engine, stall_timeout=0.05) as (owner, _):
            assert owner.stalled() is None, "nothing to do is no stall"
            engine.gate.clear()
            submission = owner.submit([generation("a")])
            while owner.stalled() is None:
                await asyncio.sleep(0.01)
            engine.gate.set()
            await rest(submission)
            assert owner.stalled() is None

    run(test)


def test_without_a_queue_what_has_a_slot_is_accepted() -> None:
    async def test() -> None:
        async with running(tiny(slots=2), max_queue=0) as (owner, _):
            submission = owner.submit([generation("a", n=2)])
            with pytest.raises(QueueFull):
                owner.submit([generation("b")])
            await rest(submission)

    run(test)


# Abort, deadlines, rows


def test_abort_ends_one_sequence_a_request_or_all() -> None:
    async def test() -> None:
        engine = tiny(slots=4)
        async with running(engine) as (owner, _):
            engine.gate.clear()
            submission = owner.submit([generation("a", 50, n=2), generation("b", 50)])
            owner.abort("a", 1)
            engine.gate.set()
            events = await submission.take()
            while not any(isinstance(event, TokenEvent) for event in events):
                events += await submission.take()
            submission.stop("b", 0)
            events += await rest(submission)
            ends = {(e.request_id, e.index): e.reason for e in finishes(events)}
            assert ends == {
                ("a", 0): FinishReason.LENGTH,
                ("a", 1): FinishReason.ABORT,
                ("b", 0): FinishReason.STOP,  # its reader found in the text what ends it
            }
            submission.abort()  # they have ended: nothing happens
            assert owner.open_sequences == 0

    run(test)


def test_an_abort_in_the_queue_is_answered_at_once() -> None:
    async def test() -> None:
        engine = GatedEngine(SPELLING, EngineConfig(slots=1))
        async with running(engine, drain_timeout=0) as (owner, _):
            first = owner.submit([generation("a", 8000)])
            second = owner.submit([generation("b", 8000)])
            await first.take()
            second.abort()
            (end,) = finishes(await rest(second))
            assert (end.reason, end.completion_tokens) == (FinishReason.ABORT, 0)
            assert end.times.admitted is None
            assert not first.finished
            first.abort()
            await rest(first)

    run(test)


def test_a_deadline_ends_what_runs_and_what_waits() -> None:
    async def test() -> None:
        engine = GatedEngine(SPELLING, EngineConfig(slots=1))
        async with running(engine) as (owner, _):
            soon = owner.now() + 0.05
            running_one = owner.submit([generation("a", 8000, deadline=soon)])
            waiting_one = owner.submit([generation("b", 8000, deadline=soon)])
            for submission in (running_one, waiting_one):
                (end,) = finishes(await rest(submission))
                assert end.reason is FinishReason.TIMEOUT
                assert end.times.finished >= soon

    run(test)


def test_rows_wait_for_their_reader_and_for_nobody_else() -> None:
    async def test() -> None:
        engine = GatedEngine(SPELLING, EngineConfig(slots=2, prefill_chunk=64))
        async with running(engine) as (owner, reports):
            rows = owner.submit([all_rows("rows", 640)])
            # Nobody takes the rows: the engine computes what its credit allows, and stops.
            events = await rest(owner.submit([generation("a", 50)]))
            assert token_ids(events, "a") == spelled("a", 50)
            handed = [e for r in reports for e in r.events if isinstance(e, OutputsChunk)]
            assert 1 <= len(handed) <= 2
            assert not rows.finished
            pieces = [e for e in await rest(rows) if isinstance(e, OutputsChunk)]
            assert [p for piece in pieces for p in piece.positions] == list(range(640))
            assert all(piece.rows.shape == (64, 257) for piece in pieces)

    run(test)


def test_the_deadline_of_paused_rows_passes_although_nothing_steps() -> None:
    async def test() -> None:
        engine = GatedEngine(SPELLING, EngineConfig(slots=1, prefill_chunk=64))
        async with running(engine) as (owner, reports):
            length = 640
            request = OutputsRequest(
                request_id="rows",
                token_ids=tuple(long_prompt(length)),
                positions=tuple(range(length)),
                deadline=owner.now() + 0.2,
            )
            submission = owner.submit([request])
            while not any(isinstance(e, FinishEvent) for r in reports for e in r.events):
                await asyncio.sleep(0.001)
            (end,) = finishes(await rest(submission))
            assert end.reason is FinishReason.TIMEOUT

    run(test)


# Reservations


def test_a_reservation_takes_the_room_of_all_and_runs_one_at_a_time() -> None:
    async def test() -> None:
        async with running(tiny(slots=2), max_queue=1) as (owner, _):
            reservation = owner.reserve([all_rows(name, 9) for name in "abc"])
            assert (owner.open_sequences, owner.open_elements) == (3, 3 * 9 * 257)
            with pytest.raises(QueueFull):
                owner.submit([generation("late")])
            for name in "abc":
                submission = reservation.submit_next()
                assert submission.request_ids == (name,)
                rows = [e for e in await rest(submission) if isinstance(e, OutputsChunk)]
                assert len(rows) == 1
            assert owner.open_elements == 0
            reservation.release()
            assert owner.open_sequences == 0

    run(test)


def test_what_is_released_is_free() -> None:
    async def test() -> None:
        async with running(tiny(slots=1), max_queue=2) as (owner, _):
            reservation = owner.reserve([all_rows(name, 9) for name in "abc"])
            await rest(reservation.submit_next())
            assert owner.open_elements == 2 * 9 * 257
            reservation.release()
            reservation.release()
            assert (owner.open_sequences, owner.open_elements) == (0, 0)
            await rest(owner.submit([generation("a", n=3)]))

    run(test)


def test_a_drain_waits_for_a_reservation() -> None:
    async def test() -> None:
        async with running(tiny()) as (owner, _):
            reservation = owner.reserve([all_rows("a", 9), all_rows("b", 9)])
            await rest(reservation.submit_next())
            stopping = asyncio.ensure_future(owner.stop(PATIENCE))
            await asyncio.sleep(0)
            with pytest.raises(EngineStopped):
                owner.submit([generation("late")])
            assert len(await rest(reservation.submit_next())) == 2
            assert not stopping.done()
            reservation.release()
            await stopping

    run(test)


def test_a_drain_that_is_over_does_not() -> None:
    async def test() -> None:
        async with running(tiny()) as (owner, _):
            reservation = owner.reserve([all_rows("a", 9), all_rows("b", 9)])
            await owner.stop(0)
            with pytest.raises(EngineStopped, match="shutting down"):
                reservation.submit_next()
            reservation.release()

    run(test)


# The elements of outputs, whatever happens

ELEMENTS_LIMIT = 100 * 257
COMMANDS = ("rows", "scores", "prompt logprobs", "generation", "too late", "reserve", "next",
            "release", "abort", "take", "go on")  # fmt: skip


class Account:
    """Asks an AsyncEngine, and knows what its open elements should be: those of the requests whose
    last sequence has not been seen to end, and of those reserved."""

    def __init__(self, owner: AsyncEngine, reports: list[StepReport]) -> None:
        self.owner, self.reports = owner, reports
        self.submissions: list[Submission] = []
        self.submitted: list[Request] = []
        self.reservations: list[tuple[Reservation, list[Request]]] = []
        self.names = 0

    def check(self) -> None:
        ended = Counter(e.request_id for r in self.reports for e in finishes(list(r.events)))
        left = [r for r in self.submitted if ended[r.request_id] < len(sequence_lengths(r))]
        left += [request for _, waiting in self.reservations for request in waiting]
        assert self.owner.open_elements == price(left)

    async def do(self, command: str, size: int) -> None:
        match command:
            case "reserve":
                self.reserve([self.request("rows", 1 + size // 2) for _ in range(3)])
            case "next":
                for reservation, waiting in self.reservations:
                    if waiting:
                        self.submissions.append(reservation.submit_next())
                        self.submitted.append(waiting.pop(0))
            case "release":
                self.release()
            case "abort":
                for submission in self.submissions[-2:]:
                    submission.abort()
            case "take":
                for submission in self.submissions:
                    await submission.take(timeout=0)
            case "go on":
                await asyncio.sleep(0.001)
            case _:
                self.submit(self.request(command, size))

    def request(self, command: str, size: int) -> Request:
        self.names += 1
        name = f"{self.names:03}"
        match command:
            case "scores":
                return scores(name, size, 1 + size // 2)
            case "prompt logprobs":
                return prompt_logprobs(name, size, n=2)
            case "generation":
                return generation(name, size, n=2)
            case "too late":
                return replace(all_rows(name, size), deadline=self.owner.now())
            case _:
                return all_rows(name, size)

    def submit(self, request: Request) -> None:
        if self.fits([request], lambda: self.submissions.append(self.owner.submit([request]))):
            self.submitted.append(request)

    def reserve(self, requests: list[Request]) -> None:
        def reserve() -> None:
            self.reservations.append((self.owner.reserve(requests), requests))

        self.fits(requests, reserve)

    def fits(self, requests: list[Request], ask: Callable[[], None]) -> bool:
        """Ask; whether it was accepted, which it has to be if there is room."""
        elements, wanted = price(requests), price(requests) + self.owner.open_elements
        try:
            ask()
        except InvalidRequest:
            assert elements > ELEMENTS_LIMIT
        except QueueFull:
            assert elements <= ELEMENTS_LIMIT < wanted
        else:
            assert self.owner.open_elements == wanted <= ELEMENTS_LIMIT
            return True
        assert self.owner.open_elements == wanted - elements, "all or none"
        return False

    def release(self) -> None:
        for reservation, waiting in self.reservations:
            reservation.release()
            waiting.clear()


def price(requests: list[Request]) -> int:
    return sum(output_elements(request, TINY.config) for request in requests)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(COMMANDS), st.integers(1, 70)), max_size=20),
    st.sampled_from(["read", "abort", "stop"]),
)
def test_numbers_leave_the_count_once_on_every_way_to_end(
    commands: list[tuple[str, int]], end: str
) -> None:
    async def test() -> None:
        async with running(
            tiny(slots=2),
            max_queue_tokens=10**6,  # so that elements alone are ever too many
            max_queue_elements=ELEMENTS_LIMIT,
            drain_timeout=0,
        ) as (owner, reports):
            account = Account(owner, reports)
            for command, size in commands:
                await account.do(command, size)
                account.check()
            if end == "stop":
                await owner.stop(0)
                account.check()
            account.release()
            for submission in account.submissions:
                if end == "abort":
                    submission.abort()
                await rest(submission)
                account.check()
            assert owner.open_elements == 0

    run(test)


# The end


def test_a_drain_lets_the_running_ones_finish() -> None:
    async def test() -> None:
        async with running(tiny(slots=1)) as (owner, _):
            submissions = [owner.submit([generation(name, 30)]) for name in "abc"]
            stopping = asyncio.ensure_future(owner.stop(PATIENCE))
            for submission in submissions:
                (end,) = finishes(await rest(submission))
                assert end.reason is FinishReason.LENGTH
            await stopping
            with pytest.raises(EngineStopped, match="shutting down"):
                owner.submit([generation("late")])

    run(test)


def test_a_short_drain_aborts_the_rest_and_tells_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        engine = GatedEngine(SPELLING, EngineConfig(slots=1))
        async with running(engine) as (owner, _):
            submissions = [owner.submit([generation(name, 8000)]) for name in "ab"]
            await submissions[0].take()
            await owner.stop(0.01)
            for submission in submissions:
                (end,) = finishes(await rest(submission))
                assert end.reason is FinishReason.ABORT
            assert owner.open_sequences == 0

    run(test)
    assert caplog.messages == ["aborting 2 sequences at shutdown"]


def test_stopping_an_idle_engine_is_quick_quiet_and_can_be_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with running(tiny()) as (owner, _):
            await owner.stop(0)
            await owner.stop(0)

    run(test)
    assert caplog.messages == []


def test_a_failure_of_the_engine_is_told_to_everyone(logged_errors: list[str]) -> None:
    async def test() -> None:
        engine = BrokenEngine(TINY, EngineConfig(slots=2))
        owner = AsyncEngine(
            LocalDriver(engine),
            AdmissionController(engine.model_config, 2, LIMITS),
            stall_timeout=PATIENCE,
            on_step=lambda report: None,
        )
        # Running, waiting for a slot, and with nothing taken yet.
        submissions = [owner.submit([generation(name, 50)]) for name in "ab"]
        submissions.append(owner.submit([all_rows("c", 9)]))
        reservation = owner.reserve([all_rows("rows", 9)])
        told = await asyncio.gather(*map(rest, submissions), return_exceptions=True)
        assert [type(one) for one in told] == [EngineStopped] * 3
        assert owner.failure is not None
        assert (owner.open_sequences, owner.open_elements) == (1, 9 * 257), "of the reservation"
        attempts: list[Callable[[], Submission]] = [
            lambda: owner.submit([generation("late")]),
            reservation.submit_next,
        ]
        for attempt in attempts:
            with pytest.raises(EngineStopped) as caught:
                attempt()
            assert "secret" not in str(caught.value), "why is for the log alone"
        reservation.release()
        assert owner.open_elements == 0
        await owner.stop(PATIENCE)

    run(test)
    assert len(logged_errors) == 1
    assert "a secret of the engine" in logged_errors[0]
    logged_errors.clear()


def test_what_was_computed_before_a_failure_is_not_lost(logged_errors: list[str]) -> None:
    async def test() -> None:
        engine = BrokenEngine(TINY, EngineConfig(slots=2))
        owner = AsyncEngine(
            LocalDriver(engine),
            AdmissionController(engine.model_config, 2, LIMITS),
            stall_timeout=PATIENCE,
            on_step=lambda report: None,
        )
        submission = owner.submit([generation("a", 50)])
        while owner.failure is None:
            await asyncio.sleep(0)
        events = await submission.take()
        assert len(token_ids(events, "a")) >= 2
        with pytest.raises(EngineStopped):
            await submission.take()
        await owner.stop(PATIENCE)

    run(test)
    logged_errors.clear()


@pytest.mark.slow
def test_ten_thousand_requests_leave_no_task_and_no_record() -> None:
    """Of every shape, some aborted: each is answered, and the event loop is as it was before."""

    async def one(owner: AsyncEngine, number: int) -> None:
        rng = random.Random(number)
        name = f"{number:05}" + "x" * rng.randrange(60)
        if number % 5 == 0:
            submission, sequences = owner.submit([all_rows(name, rng.randint(1, 40))]), 1
        else:
            sequences = rng.randint(1, 3)
            submission = owner.submit([generation(name, rng.randint(1, 6), n=sequences)])
        if number % 7 == 0:
            submission.abort()
        assert len(finishes(await rest(submission))) == sequences
        assert submission.finished

    async def test() -> None:
        async with running(tiny(slots=16), max_queue=1000, max_queue_tokens=10**6) as (owner, _):
            tasks = len(asyncio.all_tasks())
            for first in range(0, 10_000, 100):
                await asyncio.gather(*(one(owner, first + i) for i in range(100)))
            assert len(asyncio.all_tasks()) == tasks
            assert owner.open_sequences == 0
            assert not owner._open
            assert owner.admission._open == Load()

    asyncio.run(test())
