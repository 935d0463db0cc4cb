"""SlotPool: the owners of rows, the next row to use, and the prefix that a prompt can share."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from logitd.model.inference.engine.slots import SlotPool
from logitd.model.transformer.config import BLOCK

A, B = ([token] * BLOCK for token in (1, 2))
"""Blocks of token ids."""


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


held_tokens = st.lists(st.sampled_from([A, B]), max_size=4).map(lambda blocks: [*chain(*blocks)])


@given(
    st.lists(held_tokens, min_size=1, max_size=5),
    st.lists(st.sampled_from([A, B, A[:7], B[:1]]), max_size=5),
)
def test_longest_prefix_is_the_longest(contents: list[list[int]], pieces: list[list[int]]) -> None:
    prompt = [*chain(*pieces)]
    pool = SlotPool(len(contents))
    for index, held in enumerate(contents):
        pool.set_contents(index, held)
    index, length = pool.longest_prefix(prompt)
    shareable = [
        end
        for held in contents
        for end in range(0, min(len(held), len(prompt) - 1) + 1, BLOCK)
        if held[:end] == prompt[:end]
    ]
    assert length == max(shareable, default=0)
    assert contents[index][:length] == prompt[:length]
