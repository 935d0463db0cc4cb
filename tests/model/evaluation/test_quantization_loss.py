"""The loss added by quantization: the arithmetic of an evaluation, and a known value."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.data.shards import Shard
from logitd.model.data.windows import Windows, validation_windows
from logitd.model.evaluation.held_out import held_out_windows
from logitd.model.evaluation.quantization import decode_nats, quantization_loss
from logitd.model.inference.kernels.cpu.decoder import NativeDecoder
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import Quantization
from logitd.model.training.step.validate import validate
from logitd.model.transformer.gpt import GPT
from tests.model.covering import SOME_FAMILIES
from tests.model.factories import FAMILIES, byte_tokenizer, random_ids, tiny_config, tiny_gpt

BUNDLED = Path(__file__).parents[3] / "checkpoints" / "python-small"


def windows(window: int = 48, rows: int = 5) -> Windows:
    shard = Shard(Path(), random_ids(window * rows + 1).numpy(), 0)
    return validation_windows(shard, byte_tokenizer(), window=window, batch_size=rows, batches=1)


def rounded_to(bits: int) -> Any:
    """Return a function that makes a decoder with weights rounded to `bits`."""

    def make(gpt: GPT, cache: KVCache) -> PlainDecoder:
        largest = 2 ** (bits - 1) - 1
        for parameter in gpt.parameters():
            if parameter.ndim == 2:
                scale = parameter.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / largest
                parameter.copy_((parameter / scale).round() * scale)
        return PlainDecoder(gpt, cache)

    return make


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_decoding_has_the_nats_of_an_evaluation(family: str) -> None:
    gpt, text = tiny_gpt(tiny_config(**FAMILIES[family])), windows()
    (batch,) = text
    expected = validate(gpt, text, lambda ids: gpt(ids).logits)
    assert decode_nats(gpt, *batch, PlainDecoder) / expected.tokens == pytest.approx(
        expected.loss, rel=1e-5
    )


def test_quantization_loss_has_the_bits_per_byte_of_an_evaluation() -> None:
    gpt, text = tiny_gpt(), windows()
    (batch,) = text
    expected = validate(gpt, text, lambda ids: gpt(ids).logits)
    loss = quantization_loss(
        gpt, *batch, text.byte_lengths, exact=PlainDecoder, quantized=PlainDecoder
    )
    assert loss.exact == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert (loss.quantized, loss.relative) == (loss.exact, 0)
    assert loss.tokens == expected.tokens == 240


def test_quantization_loss_leaves_the_model_unchanged() -> None:
    gpt, text = tiny_gpt(), windows()
    (batch,) = text
    before = {name: value.clone() for name, value in gpt.state_dict().items()}
    places = [parameter.data_ptr() for parameter in gpt.parameters()]
    quantization_loss(gpt, *batch, text.byte_lengths, exact=PlainDecoder, quantized=rounded_to(3))
    assert all(torch.equal(value, before[name]) for name, value in gpt.state_dict().items())
    assert [parameter.data_ptr() for parameter in gpt.parameters()] == places


def test_windows_without_text_bytes_are_refused() -> None:
    gpt = tiny_gpt()
    ends = torch.full((2, 4), 256)
    with pytest.raises(ValueError, match="no bytes of text"):
        quantization_loss(gpt, ends, ends, np.zeros(257, dtype=np.int64),
                      exact=PlainDecoder, quantized=PlainDecoder)  # fmt: skip


@pytest.fixture(scope="module")
def bundled() -> tuple[GPT, Windows]:
    """The bundled checkpoint, and a text of its kind that it was not trained on."""
    info, gpt = load_checkpoint(BUNDLED, device=torch.device("cpu"), dtype=torch.float32)
    return gpt, held_out_windows(info, Path(__file__).with_name("*.py"))[1]


def test_rounding_to_three_bits_shows(bundled: tuple[GPT, Windows]) -> None:
    gpt, text = bundled
    ((inputs, targets),) = text
    few = inputs[:1, :40], targets[:1, :40]
    loss = quantization_loss(
        gpt, *few, text.byte_lengths, exact=PlainDecoder, quantized=rounded_to(3)
    )
    assert loss.relative > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("quantize", "most"), [("int8", 0.005), ("int4", 0.01)])
def test_quantizing_costs_little(
    library: ctypes.CDLL,
    bundled: tuple[GPT, Windows],
    quantize: Quantization,
    most: float,
    dtype: torch.dtype,
) -> None:
    def maker(kind: Quantization) -> Any:
        return lambda gpt, cache: NativeDecoder(library, gpt, cache, threads=1, quantize=kind)

    _, text = bundled
    gpt = load_checkpoint(BUNDLED, device=torch.device("cpu"), dtype=dtype)[1]
    ((inputs, targets),) = text
    loss = quantization_loss(
        gpt,
        inputs[:2],
        targets[:2],
        text.byte_lengths,
        exact=maker("none"),
        quantized=maker(quantize),
    )
    assert loss.quantized != loss.exact
    assert abs(loss.relative) < most
