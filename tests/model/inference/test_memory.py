"""Number of slots for one model and for several. The computed sizes are compared with real caches,
and a number of slots that does not fit into memory is refused."""

import re
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.device import DeviceError
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.memory import (
    MAX_SLOTS,
    Shape,
    SlotBudget,
    divide_slots,
    slot_bytes,
    slots_for,
    working_bytes,
)
from logitd.model.inference.options import (
    CODE_SLOTS,
    SERVED_SLOTS,
    KVCacheDType,
    MemoryShare,
    MemorySize,
    SlotDefault,
    parse_memory,
)
from logitd.model.memory import Available, format_bytes
from logitd.model.owner_code.config import CodeConfig
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.shapes import gpt2_shape
from tests.model.factories import FAMILIES, tiny_config

GIB = 2**30
SMALL = gpt2_shape(
    vocab_size=50_257, context_length=1024, n_layer=12, n_head=12, d_model=768
)  # GPT-2 124M
ONE = slot_bytes(SMALL, 2)
EACH = ONE + working_bytes(SMALL, 2)
CARD = Available("cuda:0", 8 * GIB, 6 * GIB)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", get_args(KVCacheDType))
def test_slot_size_equals_the_caches(name: str, dtype: torch.dtype, kept: KVCacheDType) -> None:
    config = tiny_config(**{**FAMILIES[name], "context_length": 50})
    cache = KVCache(config, 3, device=torch.device("cpu"), dtype=dtype, kept=kept)
    assert 3 * slot_bytes(config, dtype.itemsize, kept) == cache.nbytes
    assert cache.slot_length == 2 * BLOCK


def test_slot_of_gpt_2_in_16_bits() -> None:
    assert format_bytes(ONE) == "36.0 MiB"
    assert format_bytes(EACH) == "41.3 MiB"


def slots(available: Available = CARD, /, *, gpu: bool = True, **budget: Any) -> int:
    """Number of slots for GPT-2 124M in 16 bits; the default is 16 slots."""
    wanted = SlotBudget(**{"default": SlotDefault(16), **budget})
    (count,) = slots_for([Shape("gpt2", SMALL, 2)], wanted, available, gpu=gpu)
    return count


def test_number_of_slots_is_that_number() -> None:
    assert slots() == 16
    assert slots(slots=3) == 3


@given(share=st.floats(0.01, 1), total=st.integers(1, 2**40), used=st.floats(0, 1))
def test_share_of_a_gpu_is_filled_and_not_exceeded(share: float, total: int, used: float) -> None:
    memory = Available("cuda:0", total, total - int(used * total))
    room = share * total - (memory.total - memory.free)
    if room < EACH - 1:
        with pytest.raises(DeviceError, match="kv_cache_memory"):
            slots(memory, memory=MemoryShare(share))
    elif room >= EACH:
        count = slots(memory, memory=MemoryShare(share))
        assert count * EACH <= room
        assert count == MAX_SLOTS or (count + 1) * EACH > room - 1


@given(wanted=st.integers(1, 2**34))
def test_bytes_are_kept_to(wanted: int) -> None:
    memory = Available("cuda:0", 2**40, 2**40)
    if wanted < ONE:
        with pytest.raises(DeviceError, match=r"kv_cache_memory.*1024"):
            slots(memory, memory=wanted)
    else:
        assert slots(memory, memory=wanted) == min(MAX_SLOTS, wanted // ONE)


def test_owner_code_is_served_with_few_slots() -> None:
    """Each sequence of a step needs its own pass, so a stream waits for as many passes as there are
    slots in use."""
    code = CodeConfig.from_dict(
        {
            "vocab_size": 9, "rows": 9, "context_length": 48, "parameters": 4, "file": "owner.py",
            "expression": "Model", "values": {"top": {}, "over": {}, "values": {}},
            "deterministic": True, "padding_is_harmless": True, "has_state": False,
        }
    )  # fmt: skip
    shapes = [Shape("code", code, 4), Shape("gpt2", SMALL, 4)]
    served = slots_for(shapes, SlotBudget(), Available("cpu", 64 * GIB, 64 * GIB), gpu=False)
    assert served == (CODE_SLOTS, SERVED_SLOTS.most)
    assert slots_for(shapes, SlotBudget(20), CARD, gpu=False) == (20, 20)
    (extracted,) = slots_for(shapes[:1], SlotBudget(default=SlotDefault(32)), CARD, gpu=False)
    assert extracted == 32


def test_slots_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(DeviceError, match=r"8\.1 GiB.*200 slots.*41\.3 MiB.*6\.0 GiB.*148"):
        slots(slots=200)
    assert slots(slots=148) == 148
    with pytest.raises(DeviceError, match="149 slots"):
        slots(slots=149)
    with pytest.raises(DeviceError, match="slots"):
        slots(memory=200 * ONE)


def test_cpu_shares_memory_after_weights() -> None:
    memory = Available("this machine", 8 * GIB, 6 * GIB)
    assert slots(memory, gpu=False, slots=170) == 170  # 5.98 GiB
    with pytest.raises(DeviceError, match=r"171 slots.*36\.0 MiB.*6\.0 GiB"):
        slots(memory, gpu=False, slots=171)
    assert slots(memory, gpu=False, memory=MemoryShare(1)) == 170
    assert slots(memory, gpu=False, memory=MemoryShare(0.5)) == 85
    with pytest.raises(DeviceError, match=r"kv_cache_memory.*0\.5%.*30\.7 MiB.*36\.0 MiB"):
        slots(memory, gpu=False, memory=MemoryShare(0.005))


def served(free: int, **budget: Any) -> int:
    """The result of `slots` on a CPU, with the server's default number of slots."""
    memory = Available("this machine", 2**50, free)
    return slots(memory, gpu=False, default=SERVED_SLOTS, **budget)


@pytest.mark.parametrize(
    ("free", "count"),
    [
        (GIB, 7),  # 7 of 36 MiB, of 256
        (4 * GIB, 28),
        (9 * GIB, 64),
        (2**45, 64),  # more only on request
        (4 * 16 * ONE, 16),
        (4 * 16 * ONE - 1, 15),
        (4 * ONE - 1, 1),  # a quarter has no room for one, but serving needs one
        (ONE, 1),
    ],
)
def test_default_slots_take_a_quarter_of_free_memory(free: int, count: int) -> None:
    """When the default was always 16 slots, half of 32 clients waited for the other half, and a
    machine with no room for 16 slots could not serve."""
    assert served(free) == count


def test_model_without_room_for_a_slot_is_refused_and_context_length_named() -> None:
    with pytest.raises(DeviceError, match=r"1 slots.*36\.0 MiB.* 0 slots.*context_length"):
        served(ONE - 1)


def test_asked_slots_ignore_the_share_of_memory() -> None:
    assert served(GIB, slots=20) == 20


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
    """All weights and slots fit into free memory, and the slots fit into the given amount. If the
    amount is in bytes, each model has as many slots as its equal part allows, up to MAX_SLOTS."""
    budget = SlotBudget(None if amount is not None else count, amount)
    try:
        slots = divide_slots(shapes, budget, memory, gpu=gpu)
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
def test_default_slots_take_a_quarter_after_all_weights(
    shapes: list[Shape], memory: Available, gpu: bool
) -> None:
    """A quarter of the memory that the weights leave free is divided equally among the models. A
    model whose part is smaller than a slot still gets one slot if all weights and slots fit into
    free memory."""
    try:
        slots = divide_slots(shapes, SlotBudget(), memory, gpu=gpu)
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


def test_refusal_names_each_model_with_its_size() -> None:
    shapes = [Shape("a", tiny_config(), 4), Shape("b", tiny_config(d_model=64), 4)]
    with pytest.raises(DeviceError, match=r"a: 64 slots.*b: 64 slots.*here has .* free"):
        divide_slots(shapes, SlotBudget(slots=64), Available("here", 2**24, 2**22), gpu=False)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 10**6),
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("500MB", 5 * 10**8),
        ("64 KiB", 2**16),
        ("9007199254740993", 2**53 + 1),
        ("80%", MemoryShare(0.8)),
        (" 12.5 % ", MemoryShare(0.125)),
        ("100%", MemoryShare(1)),
    ],
)
def test_amount_of_memory_is_read(text: str, size: int | MemoryShare) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text", ["", "8 elephants", "-1", "1e9", "nan%", "0", "0.5B", "0%", "100.1%", "8Gb", "8 Mib"]
)
def test_other_text_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text) or "''"):
        parse_memory(text)
