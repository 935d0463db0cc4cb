"""AsyncEngine accepts or rejects requests: queue limits, reservations, impossible requests."""

import asyncio

import pytest

from logitd.model.inference.engine.events import (
    FinishReason,
    OutputsChunk,
)
from logitd.model.inference.engine.requests import (
    Request,
)
from logitd.model.inference.errors import InvalidRequest
from logitd.service.engine.admission import QueueFull
from logitd.service.engine.submission import EngineStopped
from tests.service.engine.harness import (
    all_rows,
    finishes,
    generation,
    prompt_logprobs,
    reserved,
    rest,
    running,
    scores,
    tiny,
)
from tests.service.serving import TEST_TIMEOUT


async def test_impossible_request_is_refused_with_all_others() -> None:
    async with running(tiny()) as (owner, _):
        for request in (generation("x" * 100, 29), generation(""), all_rows("a", 129)):
            with pytest.raises(InvalidRequest):
                owner.submit([generation("good"), request])
            with pytest.raises(InvalidRequest):
                reserved(owner, [request])
        assert owner.admission.sequences == 0, "all or none"


async def test_full_queue_rejects_all_or_nothing() -> None:
    engine = tiny(slots=2)
    async with running(engine, max_queue=3) as (owner, _):
        engine.gate.clear()
        accepted = [owner.submit([generation("a", n=2)]), owner.submit([generation("b", n=2)])]
        for refused in ([generation("c", n=2)], [generation("c"), generation("d")]):
            with pytest.raises(QueueFull, match=r"^2 sequences .* queue holds 3$") as caught:
                owner.submit(refused)
            assert 1 <= caught.value.retry_after <= 60
        assert owner.admission.sequences == 4
        accepted.append(owner.submit([generation("e")]))
        engine.gate.set()
        for submission in accepted:
            ends = [event.reason for event in finishes(await rest(submission))]
            assert set(ends) == {FinishReason.LENGTH}
        await rest(owner.submit([generation("c", n=2)]))


async def test_queue_is_bounded_by_prompt_tokens() -> None:
    """An empty queue admits any prompt that fits the model, or it would never be computed."""
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


async def test_queue_is_bounded_by_output_elements() -> None:
    """Running requests count, because their rows may still come. Requests without outputs are not
    affected."""
    engine = tiny(slots=4)
    async with running(engine, max_queue_elements=20 * 257) as (owner, _):
        engine.gate.clear()
        accepted = [owner.submit([all_rows("a", 9)]), owner.submit([scores("b", 4, 5)])]
        assert owner.admission.elements == 18 * 257
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
                reserved(owner, refused)
        accepted.append(owner.submit([generation("e", n=3)]))
        accepted.append(owner.submit([all_rows("f", 2)]))
        assert owner.admission.elements == 20 * 257, "just full"
        accepted.append(owner.submit([generation("g")]))
        engine.gate.set()
        for submission in accepted:
            await rest(submission)
        assert owner.admission.elements == 0
        await rest(owner.submit([all_rows("h", 20)]))


@pytest.mark.parametrize(
    "requests",
    [[all_rows("a", 21)], [all_rows("a", 9), all_rows("b", 12)], [scores("a", 10, 11)],
     [prompt_logprobs("a", 22)]],
    ids=["rows", "rows of two prompts", "scores", "logprobs of a prompt"],
)  # fmt: skip
async def test_more_elements_than_the_queue_ever_holds_are_invalid(
    requests: list[Request],
) -> None:
    async with running(tiny(), max_queue_elements=20 * 257) as (owner, _):
        for ask in (owner.submit, lambda requests: reserved(owner, requests)):
            with pytest.raises(InvalidRequest) as caught:
                ask(requests)
            assert f"asks for {21 * 257} output elements" in str(caught.value)
            assert f"never holds more than {20 * 257}. Ask for fewer" in str(caught.value)
        assert (owner.admission.elements, owner.admission.sequences) == (0, 0)


async def test_empty_queue_limit_admits_what_has_a_slot() -> None:
    async with running(tiny(slots=2), max_queue=0) as (owner, _):
        submission = owner.submit([generation("a", n=2)])
        with pytest.raises(QueueFull):
            owner.submit([generation("b")])
        await rest(submission)


async def test_reservation_takes_the_room_of_all_its_requests() -> None:
    async with running(tiny(slots=2), max_queue=1) as (owner, _):
        reservation = reserved(owner, [all_rows(name, 9) for name in "abc"])
        assert (owner.admission.sequences, owner.admission.elements) == (3, 3 * 9 * 257)
        with pytest.raises(QueueFull):
            owner.submit([generation("late")])
        for name in "abc":
            submission = reservation.submit_next()
            assert submission.request_ids == (name,)
            rows = [e for e in await rest(submission) if isinstance(e, OutputsChunk)]
            assert len(rows) == 1
        assert owner.admission.elements == 0
        reservation.close()
        assert owner.admission.sequences == 0


async def test_closed_reservation_gives_its_room_back() -> None:
    async with running(tiny(slots=1), max_queue=2) as (owner, _):
        reservation = reserved(owner, [all_rows(name, 9) for name in "abc"])
        await rest(reservation.submit_next())
        assert owner.admission.elements == 2 * 9 * 257
        reservation.close()
        reservation.close()
        assert (owner.admission.sequences, owner.admission.elements) == (0, 0)
        await rest(owner.submit([generation("a", n=3)]))


async def test_drain_waits_for_a_reservation() -> None:
    async with running(tiny()) as (owner, _):
        reservation = reserved(owner, [all_rows("a", 9), all_rows("b", 9)])
        await rest(reservation.submit_next())
        stopping = asyncio.ensure_future(owner.stop(TEST_TIMEOUT))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped):
            owner.submit([generation("late")])
        assert len(await rest(reservation.submit_next())) == 2
        assert not stopping.done()
        reservation.close()
        await stopping


async def test_stopped_engine_refuses_reserved_requests() -> None:
    async with running(tiny()) as (owner, _):
        reservation = reserved(owner, [all_rows("a", 9), all_rows("b", 9)])
        await owner.stop(0)
        with pytest.raises(EngineStopped, match="shutting down"):
            reservation.submit_next()
        reservation.close()
