"""Work: the formulas match numbers worked out by hand and the sizes of real tensors."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from logitd.model.benchmark.work import Work, decode_work, limit, prefill_work
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import KVCacheDType, Quantization
from logitd.model.machine import Machine
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.shapes import gpt2_shape
from logitd.model.transformer.size import attention_operations
from tests.model.factories import FAMILIES, save_tiny_checkpoint, tiny_config, tiny_gpt

GPT2 = gpt2_shape(vocab_size=50_257, context_length=1024, n_layer=12, n_head=12, d_model=768)
# The smallest GPT-2 has 768 x 2304, 768 x 768, 768 x 3072 and 3072 x 768 per block.
BLOCKS, BLOCK_ROWS = 12 * 12 * 768**2, 12 * (2304 + 768 + 3072 + 768)
HEAD = 50_257 * 768
# Two norms and four biases per block, and the last norm.
VECTORS = 12 * (4 * 768 + 2304 + 768 + 3072 + 768) + 2 * 768
LOOKED_UP = 2 * 768
"""Number of embedding elements that are looked up for one token and its position."""


@pytest.fixture(scope="module")
def gpt2() -> GPT:
    """A model on the meta device."""
    with torch.device("meta"):
        return GPT(GPT2)


def tensor_bytes(checkpoint: Path) -> dict[str, int]:
    """Size in bytes of each tensor, from the header of a checkpoint's weights file."""
    raw = (checkpoint / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    return {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_numbers_by_hand_are_all_parameters() -> None:
    assert BLOCKS + HEAD + VECTORS + 1024 * 768 == 124_439_808


def test_decode_step_equals_numbers_by_hand(gpt2: GPT) -> None:
    """The step decodes eight sequences with 288 positions each."""
    work = decode_work(gpt2, batch=8, live_positions=8 * 288)
    cells = 8 * 288 * 2 * 12 * 768
    assert work.read_bytes == 4 * (BLOCKS + HEAD + VECTORS + 8 * LOOKED_UP + cells)
    # A query of 768 numbers is multiplied by a key and a value per position and layer.
    assert work.operations == 8 * 2 * (BLOCKS + HEAD) + 8 * 288 * 12 * (2 * 768 + 2 * 768)


def test_quantized_step_reads_less(gpt2: GPT) -> None:
    """With int8, each element takes one byte. With int4, each element of the blocks takes half a
    byte, and each group of sixteen elements takes one more byte for its scale."""
    plain, eight, four = (
        decode_work(gpt2, batch=1, live_positions=100, quantize=kind)
        for kind in get_args(Quantization)
    )
    rows = BLOCK_ROWS + 50_257
    assert plain.read_bytes - eight.read_bytes == 3 * (BLOCKS + HEAD) - 8 * rows
    assert eight.read_bytes - four.read_bytes == BLOCKS * (1 - 1 / 2 - 1 / 16)
    assert eight.operations is four.operations is None


def test_prefill_equals_numbers_by_hand(gpt2: GPT) -> None:
    work = prefill_work(gpt2, prompts=3, length=5)
    seen = 1 + 2 + 3 + 4 + 5
    assert work.operations == 3 * (2 * 5 * BLOCKS + 2 * HEAD + 12 * seen * 4 * 768)
    assert work.read_bytes == 4 * (BLOCKS + HEAD + VECTORS + 3 * 5 * LOOKED_UP)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_reads_the_tensors_of_the_file(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A step reads every tensor except padding; of the embeddings, it reads only the rows that it
    looks up."""
    config = tiny_config(**FAMILIES[family])
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", gpt=tiny_gpt(config), dtype=dtype)
    _, gpt = load_checkpoint(checkpoint.path, device=torch.device("cpu"), dtype=dtype)
    item = dtype.itemsize
    sizes = tensor_bytes(checkpoint.path)
    padded_rows = config.padded_vocab_size - config.vocab_size
    padding = padded_rows * (config.d_model + config.head_bias) * item
    tables = [name for name in sizes if name.endswith("embedding.weight")]
    lookups = set(tables)
    if config.tied_head:
        lookups -= {"token_embedding.weight"}
    read = sum(size for name, size in sizes.items() if name not in lookups) - padding
    rows = sum(
        sizes[name] // (config.context_length if "position" in name else config.padded_vocab_size)
        for name in tables + ["token_embedding.weight"] * config.smear  # and of the previous token
    )
    cell = 2 * config.n_layer * config.n_kv_head * config.head_dim * item
    work = decode_work(gpt, batch=2, live_positions=10)
    assert work.read_bytes == read + 2 * rows + 10 * cell
    assert prefill_work(gpt, prompts=1, length=3).read_bytes == read + 3 * rows


@pytest.mark.parametrize("kept", get_args(KVCacheDType))
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_equal_the_cache(family: str, kept: KVCacheDType) -> None:
    config = tiny_config(**{**FAMILIES[family], "windows": None, "smear": False})
    cache = KVCache(config, 3, device=torch.device("cpu"), dtype=torch.float32, kept=kept)
    gpt = tiny_gpt(config)
    read, less = (
        decode_work(gpt, batch=1, live_positions=live, kept=kept).read_bytes
        for live in (cache.slot_length, 0)
    )
    assert 3 * (read - less) == pytest.approx(cache.nbytes)


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_equal_the_count_of_torch(family: str) -> None:
    """Torch counts the operations of a forward pass over one position. Its count includes the
    padding of the head. It leaves out attention, which this pass skips, and the gates of value
    embeddings, which are not computed as matrix products."""
    config = tiny_config(**FAMILIES[family])
    gpt = tiny_gpt(config)
    counter = FlopCounterMode(display=False)
    with counter, torch.inference_mode():
        first = torch.tensor([[0]])
        gpt.logits(gpt.transform(first, first, lambda layer, q, k, v, window=None: q))
    padding = 2 * (config.padded_vocab_size - config.vocab_size) * config.d_model
    gates = sum(weight.numel() for name, weight in gpt.named_parameters() if "value_gate" in name)
    counted = counter.get_total_flops() - padding + 2 * gates
    work = decode_work(gpt, batch=1, live_positions=0)
    assert work.operations == counted
    prefill = prefill_work(gpt, prompts=1, length=1)
    assert prefill.operations == counted + config.n_layer * attention_operations(config)


def test_windows_limit_visible_positions() -> None:
    """The visible pairs of positions are counted one by one, as the definition says."""
    windows, length = (3, None, 7), 11
    gpt = tiny_gpt(tiny_config(windows=windows))
    whole = tiny_gpt(tiny_config())
    seen = [
        sum(1 for key in range(query + 1) if window is None or query - key < window)
        for window in windows
        for query in range(length)
    ]
    works = [prefill_work(model, prompts=1, length=length) for model in (gpt, whole)]
    fewer = 3 * length * (length + 1) // 2 - sum(seen)
    saved = (works[1].operations or 0) - (works[0].operations or 0)
    assert saved == fewer * attention_operations(gpt.config)
    last = sum(seen[length - 1 :: length])
    steps = [decode_work(model, batch=2, live_positions=2 * length) for model in (gpt, whole)]
    cell = 2 * gpt.config.kv_width * 4
    assert steps[1].read_bytes - steps[0].read_bytes == 2 * (3 * length - last) * cell


def test_longer_of_reading_and_multiplying_is_the_limit() -> None:
    machine = Machine(read_bandwidth=100.0, matrix_rate=1000.0)
    assert limit(Work(50.0, 400.0), machine) == (0.5, "memory")
    assert limit(Work(50.0, 600.0), machine) == (0.6, "matrix products")
    assert limit(Work(50.0, None), machine) == (0.5, "memory")
