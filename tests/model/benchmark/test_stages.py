"""Stages: together they are the whole of `work.py`, and each is worked out by hand once."""

from collections.abc import Iterable

import pytest
import torch

from logitd.model.benchmark.stages import STAGES, Stage, decode_stage_works, prefill_stage_works
from logitd.model.benchmark.work import Work, decode_work, prefill_work, size_of
from logitd.model.inference.options import Quantization
from logitd.model.transformer.config import gpt2_shape
from logitd.model.transformer.gpt import GPT
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt

CASES = [(3, 100.5, "none"), (3, 100.5, "int8"), (3, 100.5, "int4"), (1, 7, "none")]


def together(works: Iterable[Work]) -> Work:
    works = list(works)
    operations = [work.operations for work in works if work.operations is not None]
    return Work(
        read_bytes=sum(work.read_bytes for work in works),
        operations=sum(operations) if len(operations) == len(works) else None,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("batch", "live", "quantize"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stages_of_a_step_are_the_step(
    family: str, batch: int, live: float, quantize: Quantization, dtype: torch.dtype
) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family])).to(dtype)
    works = decode_stage_works(gpt, batch=batch, live_positions=live, quantize=quantize)
    whole = decode_work(size_of(gpt), batch=batch, live_positions=live, quantize=quantize)
    assert set(works) <= set(STAGES)
    assert together(works.values()) == whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 40])
def test_the_stages_of_a_prefill_are_the_prefill(family: str, length: int) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES[family]))
    works = prefill_stage_works(gpt, length=length)
    assert together(works.values()) == prefill_work(size_of(gpt), prompts=1, length=length)


def test_a_step_of_gpt2_by_hand() -> None:
    """Two sequences at 10 and 20 positions."""
    shape = gpt2_shape(vocab_size=50_257, context_length=1024, n_layer=12, n_head=12, d_model=768)
    with torch.device("meta"):
        gpt = GPT(shape)
    expected: dict[Stage, Work] = {
        "embedding": Work(4 * 2 * (768 + 768), 0),
        "norms": Work(4 * 25 * 2 * 768, 0),
        "qkv": Work(4 * 12 * 2304 * (768 + 1), 2 * 12 * 2 * 2304 * 768),
        "attention": Work(4 * 30 * 12 * 2 * 768, 12 * 30 * 4 * 768),
        "attention_out": Work(4 * 12 * 768 * (768 + 1), 2 * 12 * 2 * 768 * 768),
        "mlp_up": Work(4 * 12 * 3072 * (768 + 1), 2 * 12 * 2 * 3072 * 768),
        "mlp_down": Work(4 * 12 * 768 * (3072 + 1), 2 * 12 * 2 * 768 * 3072),
        "head": Work(4 * 50_257 * 768, 2 * 2 * 50_257 * 768),
    }
    assert decode_stage_works(gpt, batch=2, live_positions=30) == expected


def test_a_prefill_computes_the_head_for_one_position() -> None:
    gpt = tiny_gpt()
    config = gpt.config
    works = prefill_stage_works(gpt, length=50)
    assert works["head"].operations == 2 * config.vocab_size * config.d_model
    assert works["mlp_up"].operations == 2 * 50 * config.n_layer * config.d_ff * config.d_model
