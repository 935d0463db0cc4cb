"""SlotPool: the owners of rows, the next row to use, and the prefix that a prompt can share."""

from logitd.model.inference.engine.slots import SlotPool


def test_least_recently_used_is_taken_first() -> None:
    pool = SlotPool(3)
    for _ in range(3):
        pool.acquire(step=1)
    for step, index in enumerate([1, 2, 0], start=2):
        pool.release(index, step)
    assert [pool.acquire(step=5) for _ in range(3)] == [1, 2, 0]


def test_preferred_slot_is_taken_if_it_is_free() -> None:
    pool = SlotPool(3)
    assert pool.acquire(step=1, preferred=2) == 2
    assert pool.acquire(step=2, preferred=2) == 0
    assert pool.acquire(step=3, preferred=0) == 1
