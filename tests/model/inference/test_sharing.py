"""Slots of several models on one device: what is given fits, and what does not is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.device import DeviceError
from logitd.model.inference.memory import MAX_SLOTS, SlotBudget
from logitd.model.inference.options import SERVED_SLOTS, MemoryShare, MemorySize, SlotDefault
from logitd.model.inference.sharing import Shape, divide_slots
from logitd.model.memory import Available
from tests.model.factories import tiny_config

SHAPES = st.lists(
    st.builds(
        lambda width, layers, item: Shape(
            f"of {width}", tiny_config(d_model=8 * width, n_layer=layers), item
        ),
        st.integers(1, 20).map(lambda n: 4 * n),
        st.integers(1, 4),
        st.sampled_from([2, 4]),
    ),
    min_size=1,
    max_size=4,
)
MEMORY = st.builds(
    lambda free, taken: Available("here", free + taken, free),
    st.integers(0, 2**28),
    st.integers(0, 2**26),
)
AMOUNTS: st.SearchStrategy[MemorySize | None] = st.one_of(
    st.none(), st.integers(1, 2**28), st.builds(MemoryShare, st.floats(0.001, 1))
)


@given(SHAPES, AMOUNTS, st.integers(1, 64), MEMORY, st.booleans())
def test_shares_fit_together(
    shapes: list[Shape], amount: MemorySize | None, count: int, memory: Available, gpu: bool
) -> None:
    """All weights and all slots together are within what is free, and within the amount; and each
    part has no room for another slot."""
    budget = SlotBudget(None if amount is not None else count, amount)
    try:
        slots = divide_slots(shapes, budget, memory, default=SlotDefault(16), gpu=gpu)
    except DeviceError:
        return
    weights = sum(shape.weights for shape in shapes)
    caches = [n * shape.slot(gpu=gpu) for n, shape in zip(slots, shapes, strict=True)]
    assert min(slots) >= 1
    assert weights + sum(caches) <= memory.free
    if amount is None:
        assert slots == (count,) * len(shapes)
    elif isinstance(amount, int):
        bare = [n * shape.slot(gpu=False) for n, shape in zip(slots, shapes, strict=True)]
        assert sum(bare) <= amount
        for n, shape in zip(slots, shapes, strict=True):
            assert n == MAX_SLOTS or (n + 1) * shape.slot(gpu=False) > amount // len(shapes)
    elif gpu:
        used = memory.total - memory.free + weights + sum(caches)
        assert used <= amount.fraction * memory.total
    else:
        assert sum(caches) <= amount.fraction * (memory.free - weights)


@given(SHAPES, MEMORY, st.booleans())
def test_unasked_slots_take_a_quarter_of_what_all_weights_leave(
    shapes: list[Shape], memory: Available, gpu: bool
) -> None:
    """The parts are equal. A part without room for a slot has one all the same, if all of them
    together fit into what is free."""
    try:
        slots = divide_slots(shapes, SlotBudget(), memory, default=SERVED_SLOTS, gpu=gpu)
    except DeviceError:
        sizes = [shape.slot(gpu=gpu) for shape in shapes]
        assert sum(shape.weights for shape in shapes) + sum(sizes) > memory.free * 3 / 4
        return
    left = memory.free - sum(shape.weights for shape in shapes)
    part = left / 4 / len(shapes)
    for n, shape in zip(slots, shapes, strict=True):
        size = shape.slot(gpu=gpu)
        assert n == 1 or n * size <= part
        assert n == SERVED_SLOTS.most or (n + 1) * size > part - 1


def test_refusal_names_each_with_what_it_takes() -> None:
    shapes = [Shape("a", tiny_config(), 4), Shape("b", tiny_config(d_model=64), 4)]
    with pytest.raises(DeviceError, match=r"2 models.*a .* 64 slots.*b .* 64 slots.*4\.0 MiB"):
        divide_slots(
            shapes,
            SlotBudget(slots=64),
            Available("here", 2**24, 2**22),
            default=SlotDefault(16),
            gpu=False,
        )
