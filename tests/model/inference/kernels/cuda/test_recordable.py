"""Recorded work asks a GPU for no number, and computes nothing beside it.

The check is on torch's meta device, whose tensors have shapes and no numbers: there `tolist`,
`item` and a branch on a value raise, and so does arithmetic with a tensor on the CPU. Not covered
are indices on the CPU, and what CUDA alone computes (`is_cuda`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.base import AttentionSelection, PrefillInput
from logitd.model.inference.kernels.cuda import pinned
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import SamplingRow, sampling_rows
from logitd.model.transformer.gpt import GPT
from tests.model.covering import values
from tests.model.factories import FAMILIES, tiny_config
from tests.model.inference.kernels.cpu.test_native_sample import GREEDY, PLAIN
from tests.model.inference.kernels.cuda.test_decoder import TwiceOver

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
META = torch.device("meta")
SLOTS = 6
FILTERED = SamplingRow(1.0, 3, 0.9, 0.1, seed=1, position=6, index=0)


class NoBuffer:
    """Pinned memory on the way to nowhere: what comes back is zeros."""

    def __init__(self, device: torch.device, *shape: int) -> None:
        assert device == META
        self.cells = np.zeros(shape, np.int64)
        self.turn = 0

    def copy_to(self, target: Tensor) -> None:
        assert target.device == META

    def copy_from(self, source: Tensor) -> None:
        assert source.device == META
        self.turn += 1

    def wait(self) -> None:
        """Return at once."""


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "Buffer", NoBuffer)


def on_meta(make: DecoderMaker, dtype: torch.dtype, family: str, **options: Any) -> Any:
    """A decoder of a model without numbers, whose tables of positions are there all the same."""
    shape = {**FAMILIES[family], "n_layer": 2, "context_length": 256}
    gpt = GPT(tiny_config(**shape)).to(META).to(dtype).eval()
    cache = KVCache(gpt.config, SLOTS, device=META, dtype=dtype)
    return make(gpt, cache, **options)


def step_and_sample(decoder: Any, rows: int, how: SamplingRow) -> None:
    """All that is recorded for so many rows, which are sampled in this way."""
    slots = list(range(rows))
    with torch.inference_mode():
        logits = decoder.decode([1] * rows, slots, [5] * rows)
    assert (logits.device, logits.dtype) == (META, torch.float32)
    sampling = sampling_rows([how] * rows)
    first = decoder.launch([1] * rows, slots, [6] * rows, sampling)
    decoder.launch_next(slots, slots, [7] * rows, sampling)
    assert first() == [0] * rows
    assert decoder.sample(logits, logits, sampling) == [0] * rows


@pytest.mark.parametrize(
    ("family", "dtype", "batch_invariant"), values(list(FAMILIES), DTYPES, (False, True))
)
def test_steps_and_sampling_read_nothing_back(
    family: str, dtype: torch.dtype, batch_invariant: bool
) -> None:
    decoder = on_meta(
        GraphDecoder, dtype, family, batch_invariant=batch_invariant, capture=TwiceOver()
    )
    # Keys are copied together, or read where they lie.
    for rows, how in ((1, GREEDY), (2, FILTERED), (SLOTS, PLAIN)):
        step_and_sample(decoder, rows, how)
    decoder.decode([1, 2, 3], [0, 0, 1], [5, 6, 5])  # a draft's rows


@pytest.mark.parametrize(("family", "make"), values(list(FAMILIES), (GraphDecoder, PlainDecoder)))
def test_prompts_ask_for_no_number(make: DecoderMaker, family: str) -> None:
    decoder = on_meta(make, torch.bfloat16, family)
    wanted: Sequence[tuple[bool, AttentionSelection | None]]
    wanted = [(False, None), (True, None), (False, AttentionSelection((0, 1), (0, 1), 40))]
    with torch.inference_mode():
        for slot, (states, weights) in enumerate(wanted):
            for start, end in ((0, 32), (32, 40)):
                piece = PrefillInput([1] * (end - start), slot, start, states, weights)
                hidden = decoder.prefill([piece])[0].hidden
                assert (len(hidden), hidden.device) == (end - start, META)
        assert decoder.head(hidden[-1:]).dtype == torch.float32


def test_meta_device_raises_when_read() -> None:
    """The tests above rest on this."""
    tensor = torch.zeros(3, device=META)
    asks = (
        tensor.tolist,
        lambda: bool((tensor > 0).any()),
        lambda: tensor + torch.zeros(3),
        lambda: torch.cat((tensor, torch.zeros(3))),
    )
    for ask in asks:
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask()
