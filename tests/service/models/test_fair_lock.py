"""FairLock: one holder at a time, callers in turn, and nobody that has stopped waiting."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.service.models.fair_lock import FairLock


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30))
def test_callers_take_turns_and_each_in_the_order_of_coming(
    waiters: list[tuple[str, bool]],
) -> None:
    """Whoever leaves in between; never two at once."""

    async def test() -> None:
        lock, taken = FairLock(), []
        inside = 0

        async def take(index: int, caller: str) -> None:
            nonlocal inside
            async with lock.held_by(caller):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                taken.append((index, caller))
                inside -= 1

        async with lock.held_by("first"):
            tasks = []
            for index, (caller, _) in enumerate(waiters):
                tasks.append(asyncio.create_task(take(index, caller)))
                await asyncio.sleep(0)
            for task, (_, leaves) in zip(tasks, waiters, strict=True):
                if leaves:
                    task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        stayed = [(i, caller) for i, (caller, leaves) in enumerate(waiters) if not leaves]
        assert sorted(taken) == stayed
        left = Counter(caller for _, caller in stayed)
        passed: dict[str, Counter[str]] = {caller: Counter() for caller in "abc"}
        for place, (index, caller) in enumerate(taken):
            assert all(i < index for i, other in taken[:place] if other == caller)
            left[caller] -= 1
            passed[caller].clear()
            for other in "abc":
                if other != caller and left[other]:
                    passed[other][caller] += 1
                    assert passed[other][caller] == 1
        async with asyncio.timeout(1):
            async with lock.held_by("last"):
                pass

    asyncio.run(test())


def test_a_turn_that_does_not_come_in_time() -> None:
    async def test() -> None:
        lock = FairLock()
        async with lock.held_by("a"):
            with pytest.raises(TimeoutError):
                async with lock.held_by("b", timeout=0.01):
                    raise AssertionError("it was taken")
        async with lock.held_by("b", timeout=0.01):
            pass

    asyncio.run(test())


def test_a_turn_that_comes_to_somebody_who_leaves_goes_on_to_the_next() -> None:
    """Both in the same round of the event loop."""

    async def test() -> None:
        lock, taken = FairLock(), []

        async def take(name: str) -> None:
            async with lock.held_by(name):
                taken.append(name)

        async with lock.held_by("first"):
            leaves, stays = (asyncio.create_task(take(name)) for name in ("leaves", "stays"))
            await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.gather(leaves, stays, return_exceptions=True)
        assert taken == ["stays"]

    asyncio.run(test())
