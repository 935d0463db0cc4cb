"""Loss and bits per byte."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.data.errors import DataError
from logitd.model.data.shards import Shard
from logitd.model.data.windows import (
    UNCOUNTED,
    Windows,
    rolling_windows,
    validation_windows,
)
from logitd.model.text.tokenizer import END_OF_TEXT, Tokenizer
from logitd.model.training.distributed.ranks import Ranks
from logitd.model.training.step.validate import validate
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.shapes import gpt2_shape

BYTES = {bytes([byte]): byte for byte in range(256)}
TOKENIZER = Tokenizer(
    ranks={**BYTES, b"ab": 256}, pattern=r"\S+|\s", special_tokens={END_OF_TEXT: 257}
)


def _windows(ids: list[int], window: int, batches: int | None = None) -> Windows:
    shard = Shard(Path("memory"), np.array(ids, dtype=np.uint16), 0)
    return validation_windows(shard, TOKENIZER, window=window, batch_size=2, batches=batches)


def _gpt() -> GPT:
    return GPT(gpt2_shape(vocab_size=258, context_length=8, n_layer=1, n_head=1, d_model=8))


def _uniform(ids: Tensor) -> Tensor:
    return torch.zeros(*ids.shape, 258)


def test_bits_per_byte_of_a_uniform_guess_on_a_known_text() -> None:
    """The targets are 'ab', 'x', 'ab' and the end of text: 5 bytes in 4 tokens, each of which costs
    log2(258) bits."""
    result = validate(_gpt(), _windows([65, 256, 120, 256, 257], window=4), _uniform)
    assert result.loss == pytest.approx(math.log(258))
    assert (result.tokens, result.text_bytes) == (4, 5)
    assert result.bits_per_byte == pytest.approx(4 * math.log2(258) / 5)


def test_windows_cover_the_text_or_are_spread_over_it() -> None:
    ids = [index % 256 for index in range(101)]
    assert _windows(ids, window=10).starts == list(range(0, 100, 10))
    assert _windows(ids, window=10, batches=2).starts == [0, 20, 50, 70]
    whole = validate(_gpt(), _windows(ids, window=10), _uniform)
    assert whole.tokens == 100


def test_several_processes_have_the_bits_of_one() -> None:
    """Each of three processes computes its own batches, and their sums are added as they would be
    over the network."""
    gpt, windows = _gpt(), _windows([index % 256 for index in range(101)], window=8)
    sums: list[Tensor] = []

    @dataclass(frozen=True)
    class Recorded(Ranks):
        def all_reduce_cpu(self, numbers: Tensor) -> Tensor:
            sums.append(numbers)
            return torch.stack(sums).sum(0)

    def forward(ids: Tensor) -> Tensor:
        return gpt(ids).logits.detach()

    last = [validate(gpt, windows, forward, Recorded(rank, 3)) for rank in range(3)][-1]
    assert len(windows) == 6
    assert [int((each[:, 1] > 0).sum()) for each in sums] == [2, 2, 2]
    assert last == validate(gpt, windows, forward)


def test_validate_draws_nothing_and_restores_the_mode() -> None:
    gpt = GPT(
        gpt2_shape(vocab_size=258, context_length=8, n_layer=1, n_head=1, d_model=8, dropout=0.5)
    ).train()
    windows = _windows(list(range(100)), window=8)
    before = torch.get_rng_state()
    losses = {validate(gpt, windows, lambda ids: gpt(ids).logits).loss for _ in range(3)}
    assert len(losses) == 1, "dropout is off"
    assert gpt.training
    assert torch.equal(torch.get_rng_state(), before)


@given(count=st.integers(2, 60), window=st.integers(1, 12), data=st.data())
def test_rolling_windows_count_every_token_once_with_enough_context(
    count: int, window: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window))
    shard = Shard(Path("memory"), np.arange(count, dtype=np.uint16), 0)
    windows = rolling_windows(shard, TOKENIZER, window=window, stride=stride, batch_size=3)
    counted: list[int] = []
    for inputs, targets in windows:
        assert inputs.shape == targets.shape == (len(inputs), min(window, count - 1))
        for row, after in zip(inputs.tolist(), targets.tolist(), strict=True):
            for place, token in enumerate(after):
                if token == UNCOUNTED:
                    continue
                assert row[: place + 1] == list(range(token - place - 1, token))
                assert place + 1 > min(window - stride, token - 1), "tokens before it"
                counted.append(token)
    assert counted == list(range(1, count))


def test_rolling_windows_of_whole_strides_are_the_trainers() -> None:
    """The results have the same bits if the text fills a whole number of windows. Otherwise the
    trainer leaves out the end of the text."""
    ids = [index % 256 for index in range(81)]
    shard = Shard(Path("memory"), np.array(ids, dtype=np.uint16), 0)
    gpt = _gpt()
    forward = lambda ids: gpt(ids).logits  # noqa: E731
    rolling = rolling_windows(shard, TOKENIZER, window=8, stride=8, batch_size=2)
    assert validate(gpt, rolling, forward) == validate(gpt, _windows(ids, window=8), forward)
    more = Shard(Path("memory"), np.array([*ids, 65, 65], dtype=np.uint16), 0)
    longer = rolling_windows(more, TOKENIZER, window=8, stride=8, batch_size=2)
    assert validate(gpt, longer, forward).tokens == 82
    assert validate(gpt, _windows([*ids, 65, 65], window=8), forward).tokens == 80


@pytest.mark.parametrize(("count", "stride", "message"), [(1, 4, r"too few tokens \(1\)"),
                                                          (9, 9, "stride is 9, but"),
                                                          (9, 0, "stride is 0")])  # fmt: skip
def test_impossible_windows_are_refused(count: int, stride: int, message: str) -> None:
    shard = Shard(Path("memory"), np.zeros(count, dtype=np.uint16), 0)
    with pytest.raises(DataError, match=message):
        rolling_windows(shard, TOKENIZER, window=8, stride=stride, batch_size=1)
