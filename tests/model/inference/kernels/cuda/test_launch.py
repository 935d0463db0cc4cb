"""Steps that are launched behind steps whose tokens nobody has seen: the tokens of single steps.

On a CPU without recording, and once more on a device that does everything as late as it may; on a
machine with a GPU there as well.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitd.model.inference.kernels.base import Collect, PrefillInput
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import SamplingRow, SamplingRows, sampling_rows
from logitd.model.transformer.gpt import GPT
from tests.model.factories import tiny_config, tiny_gpt
from tests.model.inference.kernels.cpu.test_native_sample import GREEDY, PLAIN
from tests.model.inference.kernels.cuda.test_decoder import (
    NEEDS_CUDA,
    Counting,
    TwiceOver,
    new_cache,
)
from tests.model.inference.kernels.late import LateDecoder, LateDevice
from tests.profiles import examples

SLOTS = 6
CONFIG = tiny_config(n_layer=2, d_model=48, vocab_size=40)
GPT_OF_ALL = tiny_gpt(CONFIG)

Make = Callable[..., GraphDecoder]


def late(gpt: GPT, cache: KVCache, **options: Any) -> LateDecoder:
    return LateDecoder(LateDevice(), gpt, cache, **options)


MAKERS: list[Any] = [
    pytest.param("cpu", GraphDecoder, id="direct"),
    pytest.param("cpu", late, id="late"),
    pytest.param("cpu", partial(GraphDecoder, capture=TwiceOver()), id="twice over"),
    pytest.param("cuda", GraphDecoder, id="cuda", marks=NEEDS_CUDA),
]


def begun(make: Make, prompts: dict[int, list[int]], device: str = "cpu") -> GraphDecoder:
    """A decoder whose slots hold these prompts, but for their last tokens."""
    gpt = tiny_gpt(CONFIG).to(device)
    decoder = make(gpt, new_cache(gpt, SLOTS))
    with torch.inference_mode():
        for slot, prompt in prompts.items():
            decoder.prefill([PrefillInput(prompt[:-1], slot, 0, False, None)])
    return decoder


def sampling_of(several: list[SamplingRow], positions: list[int]) -> SamplingRows:
    sampling = sampling_rows(several)
    sampling["position"] = positions
    return sampling


def step(decoder: GraphDecoder, texts: dict[int, list[int]], ways: dict[int, SamplingRow]) -> None:
    """A token more for each text, by a step of its own."""
    slots = list(texts)
    positions = [len(texts[slot]) - 1 for slot in slots]
    logits = decoder.decode([texts[slot][-1] for slot in slots], slots, positions)
    sampling = sampling_of([ways[slot] for slot in slots], [position + 1 for position in positions])
    for slot, token_id in zip(slots, decoder.sample(logits, logits, sampling), strict=True):
        assert token_id is not None
        texts[slot].append(token_id)


ways_to_sample = st.builds(
    SamplingRow,
    temperature=st.sampled_from([0.0, 1.0, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.just(1.0),
    min_p=st.just(0.0),
    seed=st.integers(0, 2**64 - 1),
    position=st.just(0),
    index=st.integers(0, 2),
)


@pytest.mark.parametrize(("device", "make"), MAKERS)
@settings(max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=SLOTS),
    ways=st.lists(ways_to_sample, min_size=SLOTS, max_size=SLOTS),
    steps=st.lists(st.sets(st.integers(0, SLOTS - 1), max_size=2), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_steps_behind_one_another_sample_what_single_steps_sample(
    device: str,
    make: Make,
    lengths: list[int],
    ways: list[SamplingRow],
    steps: list[set[int]],
    order: Any,
) -> None:
    """Two are under way all the time. `steps` says whose rows are left out from then on, and rows
    change their places from step to step; all sizes are one, so that no bit may differ."""
    make = partial(make, batch_invariant=True)
    prompts = {slot: [(7 * slot + i) % 40 for i in range(n)] for slot, n in enumerate(lengths)}
    ahead, single = begun(make, prompts, device), begun(make, prompts, device)
    way = dict(enumerate(ways))
    expected = {slot: list(prompt) for slot, prompt in prompts.items()}
    texts = {slot: list(prompt) for slot, prompt in prompts.items()}

    rows = list(texts)  # whose they are, in the step that was launched last
    at = {slot: len(text) - 1 for slot, text in texts.items()}
    sampling = sampling_of([way[slot] for slot in rows], [at[slot] + 1 for slot in rows])
    last = [texts[slot][-1] for slot in rows]
    under_way: tuple[list[int], Collect] = (
        rows,
        ahead.launch(last, rows, list(at.values()), sampling),
    )
    for left_out in [*steps, set(range(SLOTS))]:
        step(single, expected, way)
        stay = [slot for slot in rows if slot not in left_out]
        order.shuffle(stay)
        behind = None
        if stay:
            at = {slot: at[slot] + 1 for slot in stay}
            sampling = sampling_of([way[slot] for slot in stay], [at[slot] + 1 for slot in stay])
            sampled_in = [rows.index(slot) for slot in stay]
            behind = stay, ahead.launch_next(sampled_in, stay, [at[s] for s in stay], sampling)
        for slot, token_id in zip(under_way[0], under_way[1](), strict=True):
            assert token_id is not None
            texts[slot].append(token_id)
            assert texts[slot] == expected[slot]
        expected = {slot: expected[slot] for slot in stay}
        if behind is None:
            break
        under_way, rows = behind, stay


def test_launching_waits_for_nothing_and_collecting_for_one_step() -> None:
    prompts = {0: [1, 2, 3], 4: [5, 6, 7]}
    decoder = begun(late, prompts)
    assert isinstance(decoder, LateDecoder)
    device, slots = decoder.late, [0, 4]
    first = decoder.launch([3, 7], slots, [2, 2], sampling_of([GREEDY] * 2, [3, 3]))
    of_the_first = device.given
    second = decoder.launch_next([0, 1], slots, [3, 3], sampling_of([GREEDY] * 2, [4, 4]))
    assert device.done == 0
    found = first()
    assert device.done == of_the_first
    again = first()
    assert device.done == of_the_first
    third = decoder.launch_next([0, 1], slots, [4, 4], sampling_of([GREEDY] * 2, [5, 5]))
    assert device.done == of_the_first, "there is a buffer for it: it need not wait"
    rest = [found, second(), third()]
    assert again == found
    for slot, row in ((0, 0), (4, 1)):
        text = [*prompts[slot], *(tokens[row] for tokens in rest)]
        with torch.inference_mode():
            logits = GPT_OF_ALL(torch.tensor([text[:-1]])).logits[0]
        assert logits[2:].argmax(-1).tolist() == text[3:]


@pytest.mark.parametrize(("device", "make"), MAKERS)
def test_row_without_a_token_spoils_no_other(device: str, make: Make) -> None:
    """Numbers that are not finite give no token while the next step is under way with that row,
    which needs some id to go on with. The row beside it gets what it gets alone, and the slot's
    next sequence sees nothing of it."""
    prompts = {1: [1, 2, 3], 2: [4, 5, 6, 7]}
    decoder, alone = (begun(make, prompts, device) for _ in range(2))
    decoder._cache.values[:, 1, :, :2] = math.nan
    expected = {2: list(prompts[2])}
    for _ in range(3):
        step(alone, expected, {2: GREEDY})
    first = decoder.launch([3, 7], [1, 2], [2, 3], sampling_of([GREEDY] * 2, [3, 4]))
    second = decoder.launch_next([0, 1], [1, 2], [3, 4], sampling_of([GREEDY] * 2, [4, 5]))
    found = [first()]
    third = decoder.launch_next([1], [2], [5], sampling_of([GREEDY], [6]))
    found += [second(), third()]
    assert found[0][0] is None
    assert [found[0][1], found[1][1], found[2][0]] == expected[2][4:]
    with torch.inference_mode():
        decoder.prefill([PrefillInput([8], 1, 0, False, None)])
        plain = PlainDecoder(decoder._gpt, new_cache(decoder._gpt, 2))
        plain.prefill([PrefillInput([8], 1, 0, False, None)])
        logits = decoder.decode([9], [1], [1])
        assert torch.allclose(logits, plain.decode([9], [1], [1]), atol=2e-3)


def test_step_behind_is_recorded_once_for_each_number_of_rows() -> None:
    counting = Counting()
    prompts = {slot: [slot, 1, 2] for slot in range(4)}
    decoder = begun(partial(GraphDecoder, capture=counting), prompts)
    slots, sampling = list(range(4)), partial(sampling_of, [PLAIN] * 4)
    collect = decoder.launch([2] * 4, slots, [2] * 4, sampling([3] * 4))
    assert counting.recorded == 2  # a forward, a sample
    for position in range(3, 9):
        behind = decoder.launch_next(slots, slots, [position] * 4, sampling([position + 1] * 4))
        collect()
        collect = behind
    assert counting.recorded == 3
    assert counting.runs == 2 + 3 * 6


def test_close_waits_for_launched_steps() -> None:
    decoder = begun(late, {0: [1, 2, 3]})
    assert isinstance(decoder, LateDecoder)
    decoder.launch([3], [0], [2], sampling_of([GREEDY], [3]))
    decoder.launch_next([0], [0], [3], sampling_of([GREEDY], [4]))
    assert not decoder.late.idle()
    decoder.close()
    assert decoder.late.idle()
    assert decoder.recorded == 0


def test_decoder_offers_to_launch_unless_told_otherwise() -> None:
    gpt = tiny_gpt(CONFIG)
    decoder = GraphDecoder(gpt, new_cache(gpt, 1))
    assert decoder.launcher is decoder
    assert GraphDecoder(gpt, new_cache(gpt, 1), overlap=False).launcher is None
    assert PlainDecoder(gpt, new_cache(gpt, 1)).launcher is None
