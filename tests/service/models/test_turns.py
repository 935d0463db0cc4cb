"""Turns: callers alternate, and a cancelled wait passes the lock on."""

import asyncio

from logitd.service.models.turns import CallerTurns


async def test_callers_alternate_and_their_requests_stay_in_order() -> None:
    turns, order = CallerTurns(), list[str]()

    async def work(caller: str, number: int) -> None:
        async with turns.turn(caller):
            order.append(f"{caller}{number}")
            await asyncio.sleep(0)

    many = [("a", number) for number in range(5)]
    async with asyncio.TaskGroup() as group:
        for caller, number in [*many, ("b", 0), ("c", 0), ("b", 1)]:
            group.create_task(work(caller, number))
    assert order == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4"]


async def test_places_are_held_at_the_same_time() -> None:
    turns, inside, go_on = CallerTurns(2), list[int](), asyncio.Event()

    async def work(number: int) -> None:
        async with turns.turn("a"):
            inside.append(number)
            await go_on.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(work(number))
        await asyncio.sleep(0)
        assert (inside, turns.is_full) == ([0, 1], True)
        go_on.set()
    assert (inside, turns.is_full) == ([0, 1, 2], False)


async def test_only_one_holds_the_lock_even_if_waiting_tasks_are_cancelled() -> None:
    turns, holders, finished = CallerTurns(), set[int](), list[int]()

    async def work(number: int) -> None:
        async with turns.turn(str(number % 3)):
            assert not holders
            holders.add(number)
            try:
                await asyncio.sleep(0)
            finally:
                holders.remove(number)
        finished.append(number)

    for cancelled_after in range(12):
        finished.clear()
        tasks = [asyncio.create_task(work(number)) for number in range(9)]
        for _ in range(cancelled_after):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()  # some wait, one may hold the lock, and one may just have got it
        await asyncio.gather(*tasks, return_exceptions=True)
        assert {1, 3, 5, 7} <= set(finished)
