"""GraphDecoder against PlainDecoder on a CPU, without capturing CUDA graphs. Covers sizes, padding,
slots, prompts whose tokens are rows of decode steps, and tokens read from the device.
`test_kernels.py` checks the kernels; `python -m benchmarks.gpu` checks the decoder and the kernels
on a GPU."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.inference.kernels.base import AttentionSelection, PrefillInput
from logitd.model.inference.kernels.cuda import decoder as graphs
from logitd.model.inference.kernels.cuda.check import tolerance
from logitd.model.inference.kernels.cuda.stream import Compute, DirectStream
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import sample_tokens, sampling_rows
from logitd.model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt
from tests.model.inference.kernels.cpu.test_native_sample import GREEDY, PLAIN
from tests.model.inference.kernels.graphs import graph_decoder
from tests.model.inference.kernels.late import LateDecoder, LateDevice
from tests.profiles import examples

SHAPES: dict[str, dict[str, Any]] = {
    **{name: dict(family) for name, family in FAMILIES.items()},
    "context-50": {**FAMILIES["modern"], "context_length": 50},
    "padded-vocabulary": {"vocab_size": 41, "tied_head": False},
}


class Counting(DirectStream):
    """A stream that counts its recordings, and how often they run."""

    recorded = runs = 0

    def record(self, compute: Compute, undo: Compute) -> Compute:
        self.recorded += 1

        def run() -> None:
            self.runs += 1
            compute()

        return run


class Pair:
    """A graph decoder and a plain one, each with a cache, given the same inputs."""

    def __init__(self, gpt: GPT, slots: int, **options: Any) -> None:
        weight = gpt.token_embedding.weight
        cache = partial(KVCache, gpt.config, slots, device=weight.device, dtype=weight.dtype)
        self.caches = cache(), cache()
        self.graph = graph_decoder(gpt, self.caches[0], **options)
        self.plain = PlainDecoder(gpt, self.caches[1])

    @torch.inference_mode()
    def prefill(self, slot: int, ids: list[int]) -> None:
        for decoder in (self.graph, self.plain):
            decoder.prefill([PrefillInput(ids, slot, 0)])

    @torch.inference_mode()
    def decode(
        self, token_ids: list[int], slots: list[int], positions: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Compare the logits of both decoders, and return them."""
        rows = token_ids, slots, positions
        graph, plain = self.graph.decode(*rows), self.plain.decode(*rows)
        off = (graph - plain).square().mean(-1).sqrt() / plain.std(-1)
        assert float(off.max()) <= tolerance(self.caches[0].keys.dtype)
        return graph, plain


step_entries = st.tuples(st.integers(0, 4), st.integers(0, 60), st.integers(0, 3))
"""A slot, the length of its new prompt (0 for none), and the number of tokens in its draft."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("batch_invariant", [False, True])
@settings(max_examples=examples(25))
@example(steps=[[(1, 10, 2)], [(1, 0, 3), (2, 40, 1)], [(1, 3, 0)]], name="modern")
@given(
    steps=st.lists(st.lists(step_entries, min_size=1, max_size=4), min_size=1, max_size=6),
    name=st.sampled_from(sorted(SHAPES)),
)
def test_any_sequence_of_steps_matches_the_plain_decoder(
    dtype: torch.dtype, batch_invariant: bool, steps: Any, name: str
) -> None:
    """The steps include reused slots, aborted sequences, partly right drafts, and prompts of any
    length. Buckets start at 32 keys, so that the lengths fall into several buckets."""
    gpt = tiny_gpt(tiny_config(**{"n_layer": 2, **SHAPES[name]})).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "SHORTEST", 32)
        pair = Pair(gpt, 5, batch_invariant=batch_invariant)
    lengths = dict[int, int]()
    for number, step in enumerate(steps):
        rows: list[tuple[int, int, int]] = []
        for slot, prompt, drafted in {entry[0]: entry for entry in step}.values():
            length = lengths.get(slot, gpt.config.context_length)
            if prompt or length + 4 >= gpt.config.context_length:
                length = min(max(1, prompt), gpt.config.context_length - 8)
                pair.prefill(slot, [(3 * i + number) % 40 for i in range(length)])
            rows += [((7 * i + slot) % 40, slot, length + i) for i in range(1 + drafted)]
            lengths[slot] = length + 1 + drafted // 2
        pair.decode(*(list(column) for column in zip(*rows, strict=True)))


def test_recordings_are_made_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are 32 and 64 keys, 1, 4 and 8 rows, and prompts of 32 rows."""
    counting = Counting()
    monkeypatch.setattr(graphs, "SHORTEST", 32)
    pair = Pair(tiny_gpt(), 5, stream=counting)
    for slot in range(5):
        pair.prefill(slot, [slot + 1] * 30)
    for position in range(30, 36):
        for count in (1, 3, 4, 5):
            pair.decode([2] * count, list(range(count)), [position] * count)
    assert (counting.recorded, counting.runs) == (2 * 3 + 1, 6 * 4 + 5)


@pytest.mark.parametrize("batch_invariant", [False, True])
@torch.inference_mode()
def test_prompts_of_any_length_and_outputs_match_the_plain_decoder(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several prompts share a step, a longer prompt takes several steps, and the longest prompts go
    through torch. Hidden states and attention weights are returned."""
    monkeypatch.setattr(graphs, "PROMPT_ROWS", 64)
    monkeypatch.setattr(graphs, "LONGEST_PROMPT", 150)
    pair = Pair(tiny_gpt(tiny_config(context_length=256)), 5, batch_invariant=batch_invariant)
    weights = AttentionSelection(layers=[0], heads=[1], length=96)
    for pieces in (
        [PrefillInput([3] * 20, 0, 0), PrefillInput([4] * 30, 1, 0), PrefillInput([5] * 90, 2, 0)],
        [PrefillInput([6] * 30, 2, 64), PrefillInput([7] * 170, 3, 0)],
        [PrefillInput([8] * 70, 4, 0, states=True, weights=weights)],
    ):
        found, expected = pair.graph.prefill(pieces), pair.plain.prefill(pieces)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one.hidden, other.hidden, atol=1e-4)
            if other.states is not None and other.weights is not None:
                assert torch.allclose(one.states, other.states, atol=1e-4)  # type: ignore[arg-type]
                assert torch.allclose(one.weights, other.weights, atol=1e-4)  # type: ignore[arg-type]
    pair.decode([9] * 4, [0, 1, 3, 4], [20, 30, 170, 70])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tokens_are_sampled_from_the_decoded_logits(batch_invariant: bool) -> None:
    """`sample_tokens` draws the same tokens, both when sampling is part of a recorded step and when
    `sample` gets rows of logits."""
    pair = Pair(tiny_gpt(), 6, batch_invariant=batch_invariant)
    for slot in range(6):
        pair.prefill(slot, [slot, 1, 2])
    top = [GREEDY, PLAIN, *(replace(PLAIN, top_k=5, seed=seed) for seed in range(4))]
    for several in ([GREEDY] * 3, [GREEDY, PLAIN, PLAIN], top):
        count, sampling = len(several), sampling_rows(several)
        logits, _ = pair.decode([9] * count, list(range(count)), [3] * count)
        expected = sample_tokens(logits, logits, sampling)
        assert pair.graph.sample(logits, logits, sampling) == expected
        many = logits.repeat(7, 1)  # more than it has rows
        assert pair.graph.sample(many, many, sampling_rows(several * 7)) == expected * 7
        many[0, 3] = math.nan
        assert pair.graph.sample(logits, many[:count], sampling) == [None, *expected[1:]]


def test_collecting_waits_for_one_step_and_launching_for_none() -> None:
    """Row 1 never has finite logits. It gets no token, and does not affect row 0."""
    gpt, device, sampling = tiny_gpt(), LateDevice(), sampling_rows([GREEDY] * 2)
    cache = KVCache(gpt.config, 6, device=torch.device("cpu"), dtype=torch.float32)
    decoder, slots, prompts = LateDecoder(device, gpt, cache), [0, 4], ([1, 2, 3], [5, 6, 7])
    with torch.inference_mode():
        decoder.prefill([PrefillInput(prompts[row][:-1], slots[row], 0) for row in range(2)])
    cache.values[:, 4, :, 0] = math.nan
    before = device.done
    first = decoder.launch([3, 7], slots, [2, 2], sampling)
    of_the_first = device.given
    second = decoder.launch_next([0, 1], slots, [3, 3], sampling)
    assert device.done == before
    found = first()
    assert device.done == of_the_first
    third = decoder.launch_next([0, 1], slots, [4, 4], sampling)
    assert device.done == of_the_first
    tokens = [*found, *second(), *third()]
    assert (first(), [row[1] for row in tokens]) == (found, [None] * 3)
    text = [*prompts[0], *(row[0] or 0 for row in tokens)]
    with torch.inference_mode():
        assert gpt(torch.tensor([text[:-1]])).logits[0, 2:].argmax(-1).tolist() == text[3:]
    decoder.launch_next([0], [0], [5], sampling[:1])
    decoder.close()
    assert device.idle()
