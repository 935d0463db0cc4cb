"""GraphDecoder against PlainDecoder: sizes, padding, slots and lengths change roundings alone.

On a CPU without recording; on a machine with a GPU once more there, with CUDA graphs.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from logitd.model.inference.kernels.cuda import decoder as graphs
from logitd.model.inference.kernels.cuda.capture import Compute, capture_for
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder, SlotsAttend
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import DRAFTED_ROWS
from logitd.model.inference.sampling.sample import sample_tokens, sampling_rows
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.kernels.cpu.test_native_sample import GREEDY, PLAIN
from tests.profiles import examples

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
SHAPES: dict[str, dict[str, Any]] = {
    **{name: dict(overrides) for name, overrides in FAMILIES.items()},
    "context-50": {**FAMILIES["modern"], "context_length": 50},
    "padded-vocabulary": {"vocab_size": 41, "tied_head": False},
}
FLOAT32: dict[str, Any] = {"atol": 2e-3, "rtol": 1e-3}
BFLOAT16 = 0.2
"""Root mean square of a row's errors over what its logits spread by. A row of another slot or token
is off by more than 1; of thousands of single logits one or the other is off by a lot."""


def off(found: Tensor, expected: Tensor) -> float:
    """Largest error of rows (R, V), as a share of how the logits of a row spread."""
    return float(((found - expected).square().mean(-1).sqrt() / expected.std(-1)).max())


class Counting:
    """Capture that counts its recordings and their runs."""

    def __init__(self, device: str = "cpu") -> None:
        self.capture = capture_for(torch.device(device))
        self.recorded = 0
        self.runs = 0

    def record(self, compute: Compute) -> Compute:
        self.recorded += 1
        recorded = self.capture.record(compute)

        def run() -> None:
            self.runs += 1
            recorded()

        return run


class TwiceOver:
    """Runs what it records beforehand, as warming up does."""

    def record(self, compute: Compute) -> Compute:
        compute()
        compute()
        return compute


def new_cache(gpt: GPT, slots: int) -> KVCache:
    weight = gpt.token_embedding.weight
    return KVCache(gpt.config, slots, device=weight.device, dtype=weight.dtype)


class Pair:
    """A graph decoder and a plain one, each over a cache of its own, driven alike."""

    def __init__(self, gpt: GPT, slots: int, **options: Any) -> None:
        self.gpt = gpt
        self.caches = new_cache(gpt, slots), new_cache(gpt, slots)
        self.graph = GraphDecoder(gpt, self.caches[0], **options)
        self.plain = PlainDecoder(gpt, self.caches[1])

    @torch.inference_mode()
    def prefill(self, slot: int, ids: list[int], start: int = 0) -> None:
        device, length = self.graph._logits.device, len(ids) - start
        padded = ids[start:] + [0] * (-length % BLOCK)
        positions = torch.arange(start, start + len(padded), device=device)
        positions = positions.clamp(max=self.gpt.config.context_length - 1)
        token_ids = torch.tensor([padded], device=device)
        for cache in self.caches:
            self.gpt.transform(token_ids, positions[None], cache.prefill(slot, start))

    @torch.inference_mode()
    def decode(
        self, token_ids: list[int], slots: list[int], positions: list[int]
    ) -> tuple[Tensor, Tensor]:
        """The logits of both."""
        rows = token_ids, slots, positions
        return self.graph.decode(*rows), self.plain.decode(*rows)

    def poison(self) -> None:
        """Fill what slots hold behind their sequences with numbers that no sum survives."""
        for cache in self.caches:
            for slot, written in enumerate(cache._written):
                cache.keys[:, slot, :, :written] = math.nan
                cache.values[:, slot, :, :written] = math.inf


@st.composite
def plays(draw: st.DrawFn) -> list[list[tuple[int, int, int, int]]]:
    """Steps of an engine: (slot, prompt length to begin with or 0, drafted tokens, of them right).

    A slot that begins anew is one whose sequence was aborted."""
    step = st.tuples(st.integers(0, 4), st.integers(0, 60), st.integers(0, 3), st.integers(0, 3))
    steps = st.lists(st.lists(step, min_size=1, max_size=6), min_size=1, max_size=6)
    return draw(steps)


def play(
    pair: Pair, steps: Any, context: int, vocab: int, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through steps; the logits of both decoders in each."""
    texts: dict[int, list[int]] = {}
    for step in steps:
        rows: list[tuple[int, int, int]] = []
        moved: dict[int, int] = {}
        for slot, prompt, drafted, right in step:
            if slot in moved:
                continue
            if slot not in texts or prompt or len(texts[slot]) + 4 >= context:
                length = min(max(1, prompt), context - 8)
                texts[slot] = [rng.randrange(vocab) for _ in range(length)]
                pair.prefill(slot, texts[slot])
                texts[slot].append(rng.randrange(vocab))
            position = len(texts[slot]) - 1
            guesses = [rng.randrange(vocab) for _ in range(drafted)]
            run = [texts[slot][-1], *guesses]
            rows += [(token, slot, position + i) for i, token in enumerate(run)]
            moved[slot] = min(right, drafted)
            texts[slot] += [*guesses[: moved[slot]], rng.randrange(vocab)]
        rows = rows[:DRAFTED_ROWS]
        yield pair.decode(*(list(column) for column in zip(*rows, strict=True)))
        cut = {slot for _, slot, _ in rows}
        for slot in set(moved) - cut:  # did not fit: begins anew
            del texts[slot]
        last = rows[-1][1]
        texts.pop(last, None)  # may have been cut in two


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("batch_invariant", [False, True])
@settings(max_examples=examples(25))
@given(steps=plays(), name=st.sampled_from(sorted(SHAPES)), seed=st.integers(0, 2**16))
def test_any_play_gives_what_the_plain_decoder_gives(
    device: str,
    dtype: torch.dtype,
    batch_invariant: bool,
    steps: Any,
    name: str,
    seed: int,
) -> None:
    """Slots used again, sequences aborted, drafts right and wrong, prompts of any length; smallest
    buckets of 32 keys, so that lengths fall into several."""
    gpt = tiny_gpt(tiny_config(**{"n_layer": 2, **SHAPES[name]})).to(dtype).to(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "SHORTEST", 32)
        pair = Pair(gpt, 5, batch_invariant=batch_invariant)
    rng = random.Random(seed)
    for graph, plain in play(pair, steps, gpt.config.context_length, gpt.config.vocab_size, rng):
        assert graph.dtype == torch.float32
        if dtype == torch.float32:
            assert_close(graph, plain, **FLOAT32)
        else:
            assert off(graph, plain.float()) < BFLOAT16


@pytest.mark.parametrize("device", DEVICES)
def test_slot_shows_nothing_of_its_last_sequence(device: str) -> None:
    """A weight of 0 times what is not finite is not 0: so it must be gone, not only masked."""
    pair = Pair(tiny_gpt().to(device), 3)
    pair.prefill(1, list(range(100)))
    pair.decode([7], [1], [100])
    pair.poison()
    pair.prefill(1, [5, 6, 7])
    graph, plain = pair.decode([8], [1], [3])
    assert torch.isfinite(graph).all()
    assert_close(graph, plain, **FLOAT32)
    for cache in pair.caches[0].keys, pair.caches[0].values:
        assert not cache[:, 1, :, 4:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_recordings_are_made_once_for_each_size(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(device)
    monkeypatch.setattr(graphs, "SHORTEST", 32)
    pair = Pair(tiny_gpt().to(device), 5, capture=counting)
    for slot in range(5):
        pair.prefill(slot, [slot + 1] * 30)
    for position in range(30, 36):
        for count in (1, 3, 4, 5):
            pair.decode([2] * count, list(range(count)), [position] * count)
    assert (pair.graph._row_buckets, pair.graph._key_buckets) == ((1, 2, 4, 8, 16), (32, 64, 128))
    assert counting.recorded == pair.graph.recorded == 2 * 3  # keys 32, 64; rows 1, 4, 8
    assert counting.runs == 6 * 4


@pytest.mark.parametrize(
    ("slots", "invariant", "expected"),
    [
        ([4, 1, 0], False, True),
        ([4, 1], False, False),  # a copy of two is less than all seven
        ([4, 1, 1, 0], False, False),  # a draft
        ([4, 1, 0], True, False),
    ],
)
def test_keys_are_read_where_they_lie_when_most_slots_decode(
    monkeypatch: pytest.MonkeyPatch, slots: list[int], invariant: bool, expected: bool
) -> None:
    """A slot that no row is of may hold anything: nobody looks at what comes out for it."""
    ways: list[bool] = []

    class Watched(SlotsAttend):
        def __init__(self, *given: Any, in_place: bool) -> None:
            super().__init__(*given, in_place=in_place)
            ways.append(in_place)

    monkeypatch.setattr(graphs, "SlotsAttend", Watched)
    pair = Pair(tiny_gpt(), 7, batch_invariant=invariant)
    for slot in range(7):
        pair.prefill(slot, [slot + 1] * (5 * slot + 3))
    for cache in pair.caches:
        cache.keys[:, 2], cache.values[:, 2] = math.nan, math.inf
    positions = [5 * slot + 3 + slots[:i].count(slot) for i, slot in enumerate(slots)]
    graph, plain = pair.decode([9] * len(slots), slots, positions)
    assert ways == [expected]
    assert_close(graph, plain, **FLOAT32)


def test_no_more_recordings_are_kept_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_RECORDED", 2)
    counting = Counting()
    pair = Pair(tiny_gpt(), 4, capture=counting)
    for slot in range(4):
        pair.prefill(slot, [1, 2, 3])
    for count in (1, 2, 1, 4, 1):  # 4 pushes out 2, which was not used for longest
        graph, plain = pair.decode([4] * count, list(range(count)), [3] * count)
        assert_close(graph, plain, **FLOAT32)
    assert pair.graph.recorded == 2
    assert counting.recorded == 3
    pair.graph.close()
    assert pair.graph.recorded == 0


def test_more_rows_than_there_is_room_for_are_refused() -> None:
    gpt = tiny_gpt()
    decoder = GraphDecoder(gpt, new_cache(gpt, 2))
    rows = DRAFTED_ROWS + 1
    with pytest.raises(ValueError, match=r"17 rows.*16"):
        decoder.decode([0] * rows, [0] * rows, list(range(rows)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tokens_are_sampled_from_what_was_decoded(device: str, batch_invariant: bool) -> None:
    """The recorded sampling and other rows both give the twin's tokens."""
    counting = Counting(device)
    pair = Pair(tiny_gpt().to(device), 6, batch_invariant=batch_invariant, capture=counting)
    for slot in range(6):
        pair.prefill(slot, [slot, 1, 2])
    top = [GREEDY, PLAIN, *(replace(PLAIN, top_k=5, seed=seed) for seed in range(4))]
    for several in ([GREEDY] * 3, [GREEDY, PLAIN, PLAIN], top):
        count, sampling = len(several), sampling_rows(several)
        logits, _ = pair.decode([9] * count, list(range(count)), [3] * count)
        expected = sample_tokens(logits, logits, sampling)
        before = counting.runs
        assert pair.graph.sample(logits, logits, sampling) == expected
        assert counting.runs == before + 1
        apart = logits.clone()
        assert pair.graph.sample(apart, logits, sampling) == expected
        many = apart.repeat(7, 1)  # more than it has rows
        assert pair.graph.sample(many, many, sampling_rows(several * 7)) == expected * 7
        assert counting.runs == before + 1
        apart[0, 3] = math.nan
        assert pair.graph.sample(logits, apart, sampling) == [None, *expected[1:]]


@pytest.mark.parametrize("device", DEVICES)
def test_batch_invariant_every_step_has_one_size(device: str) -> None:
    """One recording for all steps and one for all samples, and a row has the bits that it has
    alone."""
    counting = Counting(device)
    gpt = tiny_gpt(tiny_config(d_model=48)).to(device)
    pair = Pair(gpt, 5, batch_invariant=True, capture=counting)
    alone = []
    for slot in range(5):
        pair.prefill(slot, [slot + 1] * (10 * slot + 3))
    for slot in range(5):
        logits, _ = pair.decode([9], [slot], [10 * slot + 3])
        pair.graph.sample(logits, logits, sampling_rows([PLAIN if slot else GREEDY]))
        alone.append(logits.clone())
    logits, _ = pair.decode([9] * 5, list(range(5)), [10 * slot + 3 for slot in range(5)])
    together = list(logits.split(1))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert counting.recorded == 2
